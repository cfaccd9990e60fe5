"""Checks each step's metrics and warns, naming the key to change, if a run is not learning as it should.

It changes and stops nothing. It warns of each cause once, and again only when it has become twice as bad; consequences
of another cause are left out. The most important comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

TRUNCATED_SHARE = 0.25  # our choice: runs of PODS and TRL lose a few percent
NEARLY_ALL = 0.75  # truncated: equal rewards are a consequence
ZERO_STD_SHARE = 0.9
RATIO_RANGE = (0.9, 1.1)
RATIOS = ("mismatch/ratio_mean", "mismatch_trained/ratio_mean")  # a step has at most one of them
EQUAL_STEPS = 5
FEWEST_HELD_OUT = 20  # with 20, the 95 % interval of an accuracy is up to 0.4 wide
LEAST_ESS = 0.1
FIRST_ENTROPIES = 5  # steps, whose mean is a run's initial entropy
ENTROPY_LEFT = 0.1  # of that
LEAST_ENTROPY = 0.05  # nats
ALIKE_SHARE = 0.5  # of the groups
SOLVED_SHARE = 0.8


class HealthCheck:
    """Remembers which causes were reported, how long all rewards have been equal, and the first entropies.

    `reuse_is_answered`: a correction, or the learning rate, accounts for how far tokens are from the policy.
    """

    def __init__(self, reuse_is_answered: bool = False) -> None:
        self._reuse_is_answered = reuse_is_answered
        self._warned_of: dict[str, float] = {}  # how bad each cause was then
        self._equal_steps = 0
        self._entropies: list[float] = []  # the first ones

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the new warnings of this step, the most important first."""
        return [text for name, badness, text in [*self._causes(metrics)] if self._is_new(name, badness)]

    def _is_new(self, name: str, badness: float) -> bool:
        """True if the cause was never reported, or has become twice as bad since."""
        before = self._warned_of.get(name, 0.0)
        if before and (badness < 2 * before or badness == before):  # equal: both infinite
            return False
        self._warned_of[name] = badness
        return True

    def _causes(self, seen: Mapping[str, float]) -> Iterator[tuple[str, float, str]]:
        """Yield each cause's name, how bad it is (1 if it is reported once), and what to do."""
        truncated, share = seen.get("response/truncated", 0.0), seen.get("group/zero_std", 0.0)
        if "reward/std" in seen:
            self._equal_steps = self._equal_steps + 1 if seen["reward/std"] == 0.0 else 0
        if truncated > TRUNCATED_SHARE:
            why = "a share cut off: raise sampling.max_new_tokens."
            yield "truncated", truncated, f"response/truncated is {truncated:.2f}, {why}"
        if truncated <= NEARLY_ALL and "reward/std" in seen and self._equal_steps >= EQUAL_STEPS:
            why = "read a few completions (grpo show): the task's answers or judge are wrong, or it is too hard."
            equal = f"every reward of the last {self._equal_steps} steps was equal"
            yield "equal", float(self._equal_steps), f"{equal}; {why}"
        elif truncated <= NEARLY_ALL and share > ZERO_STD_SHARE:
            why = "of equal rewards teach nothing; raise n or sampling.temperature, or choose other problems (task)."
            yield "zero_std", 1.0, f"group/zero_std is {share:.2f}: groups {why}"
        name = next((name for name in RATIOS if name in seen), RATIOS[0])
        if not RATIO_RANGE[0] <= (ratio := seen.get(name, 1.0)) <= RATIO_RANGE[1]:  # so is NaN
            why = "disagree; use correction=tis, model.dtype=float32 model.autocast=none, or evict less (sparsity)."
            badness = abs(math.log(ratio)) if 0.0 < ratio < math.inf else math.inf
            yield "mismatch", badness, f"{name} is {ratio:.3f}: sampler and policy {why}"
        if (ess := seen.get("off/ess", 1.0)) < LEAST_ESS:
            why = "has moved far from its rollouts; use optim.ess=sqrt, a lower optim.lr, or fewer train.minibatches."
            yield "ess", 1.0 / ess if ess > 0.0 else math.inf, f"off/ess is {ess:.3f}: the policy {why}"
        if (old := seen.get("off/token_share", 0.0)) > 0.0 and not self._reuse_is_answered:
            why = "nothing corrects for tokens of earlier weights; use correction=tis, or optim.ess=sqrt."
            yield "reuse", old, f"off/token_share is {old:.2f}: {why}"
        if (collapsed := self._collapsed(seen)) is not None:
            yield "entropy", 1.0, collapsed
        if (count := seen.get("eval/problems", math.inf)) < FEWEST_HELD_OUT:
            why = "on so few says little; hold out more (eval.problems, task.eval_path, or task.eval_fraction)."
            yield "few_held_out", 1.0, f"eval/problems is {count:.0f}: accuracy {why}"

    def _collapsed(self, seen: Mapping[str, float]) -> str | None:
        """Return the warning of a policy that is certain, repeats the same answers and is still wrong."""
        entropy = seen.get("policy/entropy")
        if entropy is None or len(self._entropies) < FIRST_ENTROPIES:
            self._entropies += [] if entropy is None else [entropy]
            return None
        first = sum(self._entropies) / len(self._entropies)
        solved = seen.get("reward/correct", seen.get("reward/mean", 1.0))
        gone = entropy < min(LEAST_ENTROPY, ENTROPY_LEFT * first)
        if not gone or seen.get("group/zero_std", 0.0) < ALIKE_SHARE or solved >= SOLVED_SHARE:
            return None
        why = "no longer explores; lower optim.lr, or raise loss.kl_coef, loss.clip_high or sampling.temperature."
        return f"policy/entropy is {entropy:.3f}, was {first:.3f}: the policy {why}"
