"""Checks each step's metrics and warns, naming the key to change, if a run is not learning as it should.

It changes and stops nothing. It warns of each cause once, and again only when it has become twice as bad; consequences
of another cause are left out. The most important comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

TRUNCATED_SHARE = 0.25  # our choice: runs of PODS and TRL lose a few percent
NEARLY_ALL = 0.75  # truncated: equal rewards are a consequence
ZERO_STD_SHARE = 0.9
RATIO_RANGE = (0.9, 1.1)
RATIOS = ("mismatch/ratio_mean", "mismatch_trained/ratio_mean")  # a step has at most one of them
EQUAL_STEPS = 5
FEW_PROBLEMS_STEPS = 50
FEWEST_HELD_OUT = 20  # with 20, the 95 % interval of an accuracy is up to 0.4 wide
TWICE = 2.0
LEAST_ESS = 0.1
FIRST_ENTROPIES = 5  # steps, whose mean is a run's initial entropy
ENTROPY_LEFT = 0.1  # of that
LEAST_ENTROPY = 0.05  # nats
ALIKE_SHARE = 0.5  # of the groups
SOLVED_SHARE = 0.8


class Cause(NamedTuple):
    """Why a run does not learn as it should. A cause is reported again when its `badness` has doubled; with the default
    it is reported once."""

    name: str
    text: str
    badness: float = 1.0


class HealthCheck:
    """Remembers which causes were reported, how long all rewards have been equal, and the number of steps.

    `reuse_is_answered`: a correction, or the learning rate, accounts for how far tokens are from the policy.
    `weighed_parts`: the parts of the reward that the advantage weighs by name.
    """

    def __init__(self, reuse_is_answered: bool = False, weighed_parts: Iterable[str] = ()) -> None:
        self._reuse_is_answered = reuse_is_answered
        self._unseen_parts = list(weighed_parts)
        self._warned_of: dict[str, float] = {}  # how bad each cause was then
        self._equal_steps = self._steps = 0
        self._entropies: list[float] = []  # the first ones

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """The new warnings of this step, the most important first."""
        causes = [
            *self._uniform_rewards(metrics),
            *_sampler_and_policy(metrics, self._reuse_is_answered),
            *self._entropy(metrics),
            *self._too_few(metrics),
        ]
        return [cause.text for cause in causes if self._is_new(cause)]

    def _is_new(self, cause: Cause) -> bool:
        """Whether it was never reported, or has become twice as bad since."""
        before = self._warned_of.get(cause.name, 0.0)
        if before and (cause.badness < TWICE * before or cause.badness == before):  # equal: both infinite
            return False
        self._warned_of[cause.name] = cause.badness
        return True

    def _uniform_rewards(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        """Rewards without a signal, and their cause."""
        mean, truncated = metrics.get("reward/mean", math.nan), metrics.get("response/truncated", 0.0)
        if "reward/std" in metrics:
            self._equal_steps = self._equal_steps + 1 if metrics["reward/std"] == 0.0 else 0
        if truncated > TRUNCATED_SHARE:
            text = (
                f"response/truncated is {truncated:.2f}: that share of the rollouts was cut off, so "
                "its reward says little. Raise sampling.max_new_tokens."
            )
            yield Cause("truncated", text, truncated)
        if truncated > NEARLY_ALL:
            return
        if "reward/std" in metrics and self._equal_steps >= EQUAL_STEPS:
            text = (
                f"every reward of the last {self._equal_steps} steps was {mean:g}, so nothing was learnt. Read a few "
                "completions in rollouts.jsonl: if they look right, the task's answers or its judge are wrong (task); "
                "if not, choose easier problems (task), a stronger model (model.path) or a higher sampling.temperature."
            )
            yield Cause("equal", text, self._equal_steps)
        elif (share := metrics.get("group/zero_std", 0.0)) > ZERO_STD_SHARE:
            text = (
                f"group/zero_std is {share:.2f}: in that share of the groups all rewards are equal, and such a group "
                f"teaches nothing (reward/mean is {mean:.2f}). Raise n or sampling.temperature, or choose problems "
                "that are neither too easy nor too hard (task)."
            )
            yield Cause("zero_std", text)

    def _entropy(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        """A policy that solves its problems may be certain. One that is certain, repeats the same answers and is still
        wrong has stopped exploring."""
        entropy = metrics.get("policy/entropy")
        if entropy is None:
            return
        if len(self._entropies) < FIRST_ENTROPIES:
            self._entropies.append(entropy)
            return
        first = sum(self._entropies) / len(self._entropies)
        alike = metrics.get("group/zero_std", 0.0)
        solved = metrics.get("reward/correct", metrics.get("reward/mean", 1.0))
        if entropy < min(LEAST_ENTROPY, ENTROPY_LEFT * first) and alike >= ALIKE_SHARE and solved < SOLVED_SHARE:
            text = (
                f"policy/entropy is {entropy:.3f} nats, and was {first:.3f} in the first steps: the policy hardly "
                f"explores any more, while group/zero_std is {alike:.2f} and only {solved:.2f} is solved. Lower "
                "optim.lr, keep it near its start (loss.kl_coef), clip less from above (loss=dapo, or a higher "
                "loss.clip_high), or raise sampling.temperature, from a checkpoint before this."
            )
            yield Cause("entropy", text)

    def _too_few(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        """Parts of a reward, problems to train on, problems to evaluate on."""
        if "reward/mean" in metrics:
            self._unseen_parts = [part for part in self._unseen_parts if f"reward/{part}" not in metrics]
            if self._unseen_parts:
                keys = " and ".join(f"advantage.weights.{part}" for part in self._unseen_parts)
                text = (
                    f"{keys} has had no effect so far: no rollout's reward has a part of that name. Use one of "
                    "the parts that metrics.jsonl lists as reward/<part>, or leave it out."
                )
                yield Cause("weights", text)
        if "prompts/distinct" in metrics:
            self._steps += 1
            distinct, per_step = metrics["prompts/distinct"], metrics["collect/problems"]
            if self._steps >= FEW_PROBLEMS_STEPS and distinct < 2 * per_step:
                text = (
                    f"prompts/distinct is {distinct:.0f} with {per_step:.0f} problems a step: the run trains on the "
                    "same few over and over, and may memorize them. Give the task more problems "
                    "(task.train_problems), or choose a curriculum that looks at more of them (curriculum=epochs, or a "
                    "smaller curriculum.pool)."
                )
                yield Cause("few_problems", text)
        if (count := metrics.get("eval/problems", math.inf)) < FEWEST_HELD_OUT:
            text = (
                f"eval/problems is {count:.0f}: the accuracy on so few held-out problems says little; see its "
                "interval. Hold out more (eval.problems, task.eval_path, or task.eval_fraction)."
            )
            yield Cause("few_held_out", text)


def _sampler_and_policy(metrics: Mapping[str, float], reuse_is_answered: bool) -> Iterator[Cause]:
    """How far the policy is from the one that drew the rollouts."""
    name = next((name for name in RATIOS if name in metrics), RATIOS[0])
    ratio, (low, high) = metrics.get(name, 1.0), RATIO_RANGE
    if not low <= ratio <= high:  # so is NaN
        text = (
            f"{name} is {ratio:.3f}, outside {low}-{high}: the sampler and the trained policy disagree. "
            "Choose a correction (correction=tis), set sampling.top_p=1 and sampling.top_k=0, compute in full "
            "precision (model.dtype=float32 model.autocast=none), or evict fewer KV entries (sparsity)."
        )
        yield Cause("mismatch", text, abs(math.log(ratio)) if 0.0 < ratio < math.inf else math.inf)
    if (ess := metrics.get("off/ess", 1.0)) < LEAST_ESS:
        text = (
            f"off/ess is {ess:.3f}: the rollouts of an update are worth that share of their number, as the policy "
            "has moved far from the one that drew them. Let the learning rate follow (optim.ess=sqrt), lower optim.lr, "
            "make fewer updates of a step (train.epochs, train.minibatches), or reuse less."
        )
        yield Cause("ess", text, 1.0 / ess if ess > 0.0 else math.inf)
    if (share := metrics.get("off/token_share", 0.0)) > 0.0 and not reuse_is_answered:
        text = (
            f"off/token_share is {share:.2f}: that share of the tokens was drawn by weights of earlier updates, and "
            "nothing corrects for it. Reweight them (correction=tis), or let the learning rate follow (optim.ess=sqrt)."
        )
        yield Cause("reuse", text, share)
