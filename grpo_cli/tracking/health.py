"""Checks each step's metrics and warns, naming the key to change, if a run is not learning as it should.

It changes and stops nothing. It warns of each cause once; consequences of another cause are left out. The most
important comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

TRUNCATED_SHARE = 0.25  # our choice: runs of PODS and TRL lose a few percent
NEARLY_ALL = 0.75  # truncated: equal rewards are a consequence
ZERO_STD_SHARE = 0.9
RATIO_RANGE = (0.9, 1.1)
EQUAL_STEPS = 5
FEWEST_HELD_OUT = 20  # with 20, the 95% interval of an accuracy is up to 0.4 wide
LEAST_ESS = 0.1
SOME_REWARD = 0.25  # on average, from a reward that never says that an answer is right


class HealthCheck:
    """The causes reported, and the number of steps in which all rewards were equal."""

    def __init__(self) -> None:
        self._reported = set[str]()
        self._equal_steps = 0

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the new warnings of this step, the most important first."""
        new = {name: text for name, text in self._causes(metrics) if name not in self._reported}
        self._reported |= new.keys()
        return [*new.values()]

    def _causes(self, seen: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield each cause's name, and what to do."""
        truncated, share = seen.get("response/truncated", 0.0), seen.get("group/zero_std", 0.0)
        if "reward/std" in seen:
            self._equal_steps = self._equal_steps + 1 if seen["reward/std"] == 0.0 else 0
        if truncated > TRUNCATED_SHARE:
            yield "cut", f"response/truncated: {truncated:.0%} of replies are cut off; raise sampling.max_new_tokens."
        if truncated <= NEARLY_ALL and "reward/std" in seen and self._equal_steps >= EQUAL_STEPS:
            why = "read completions (grpo show): the task's answers or judge are wrong, or it is too hard or easy."
            yield "equal", f"every reward of the last {self._equal_steps} steps was equal; {why}"
        elif truncated <= NEARLY_ALL and share > ZERO_STD_SHARE:
            why = "have equal rewards, which teach nothing; raise n or sampling.temperature, or choose other problems."
            yield "zero_std", f"group/zero_std: {share:.0%} of groups {why}"
        if not RATIO_RANGE[0] <= (ratio := seen.get("mismatch/ratio_mean", 1.0)) <= RATIO_RANGE[1]:  # so is NaN
            why = "disagree; use correction=tis, model.dtype=float32 model.autocast=none, or evict less (sparsity)."
            yield "mismatch", f"mismatch/ratio_mean is {ratio:.3f}: sampler and policy {why}"
        if (ess := seen.get("off/ess", 1.0)) < LEAST_ESS:
            why = "has moved far from its rollouts; use optim.ess=sqrt, a lower optim.lr, or fewer train.minibatches."
            yield "ess", f"off/ess is {ess:.3f}: the policy {why}"
        if seen.get("eval/accuracy") == 0 and seen.get("reward/mean", 0.0) >= SOME_REWARD:
            why = (
                "counts as right (`correct`, or the total, of at least 1), though there are rewards; return `correct`."
            )
            yield "right", f"eval/accuracy is 0: no answer {why}"
        if (count := seen.get("eval/problems", FEWEST_HELD_OUT)) < FEWEST_HELD_OUT:
            why = "on so few says little; hold out more (eval.problems, task.eval_path, or task.eval_fraction)."
            yield "few", f"eval/problems is {count:.0f}: accuracy {why}"
