"""Checks each step's metrics and warns, naming the key to change, if a run is not learning as it should.

It changes and stops nothing. It warns of each cause once, and again only when it has become twice as bad; consequences
of another cause are left out. The most important comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

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


class Cause(NamedTuple):
    """Why a run does not learn as it should. A cause is reported again when its `badness` has doubled; with the default
    it is reported once."""

    name: str
    text: str
    badness: float = 1.0


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
        causes = [*self._rewards(metrics), *_distance(metrics, self._reuse_is_answered), *self._entropy(metrics)]
        if (count := metrics.get("eval/problems", math.inf)) < FEWEST_HELD_OUT:
            text = (
                f"eval/problems is {count:.0f}: the accuracy on so few held-out problems says little; hold out more "
                "(eval.problems, task.eval_path, or task.eval_fraction)."
            )
            causes.append(Cause("few_held_out", text))
        return [cause.text for cause in causes if self._is_new(cause)]

    def _is_new(self, cause: Cause) -> bool:
        """True if it was never reported, or has become twice as bad since."""
        before = self._warned_of.get(cause.name, 0.0)
        if before and (cause.badness < 2 * before or cause.badness == before):  # equal: both infinite
            return False
        self._warned_of[cause.name] = cause.badness
        return True

    def _rewards(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        """Return rewards without a signal, and their cause."""
        mean, truncated = metrics.get("reward/mean", math.nan), metrics.get("response/truncated", 0.0)
        if "reward/std" in metrics:
            self._equal_steps = self._equal_steps + 1 if metrics["reward/std"] == 0.0 else 0
        if truncated > TRUNCATED_SHARE:
            text = f"response/truncated is {truncated:.2f}, a share cut off: raise sampling.max_new_tokens."
            yield Cause("truncated", text, truncated)
        if truncated > NEARLY_ALL:
            return
        if "reward/std" in metrics and self._equal_steps >= EQUAL_STEPS:
            text = (
                f"every reward of the last {self._equal_steps} steps was {mean:g}, so nothing was learnt. Read a few "
                "completions (grpo show): the task's answers or judge are wrong, or its problems too hard."
            )
            yield Cause("equal", text, self._equal_steps)
        elif (share := metrics.get("group/zero_std", 0.0)) > ZERO_STD_SHARE:
            text = (
                f"group/zero_std is {share:.2f}, the share of groups of equal rewards, which teach nothing "
                f"(reward/mean is {mean:.2f}). Raise n or sampling.temperature, or choose other problems (task)."
            )
            yield Cause("zero_std", text)

    def _entropy(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        """Return a cause for a policy that is certain, repeats the same answers and is still wrong."""
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
                f"policy/entropy is {entropy:.3f} nats, was {first:.3f} at first, and only {solved:.2f} is solved: the "
                "policy hardly explores. From an earlier checkpoint, lower optim.lr, or raise loss.kl_coef, "
                "loss.clip_high or sampling.temperature."
            )
            yield Cause("entropy", text)


def _distance(metrics: Mapping[str, float], reuse_is_answered: bool) -> Iterator[Cause]:
    """Return causes in how far the policy is from the one that drew the rollouts."""
    name = next((name for name in RATIOS if name in metrics), RATIOS[0])
    ratio, (low, high) = metrics.get(name, 1.0), RATIO_RANGE
    if not low <= ratio <= high:  # so is NaN
        text = (
            f"{name} is {ratio:.3f}, outside {low}-{high}: sampler and policy disagree. Choose a correction "
            "(correction=tis), model.dtype=float32 model.autocast=none, or evict fewer KV entries (sparsity)."
        )
        yield Cause("mismatch", text, abs(math.log(ratio)) if 0.0 < ratio < math.inf else math.inf)
    if (ess := metrics.get("off/ess", 1.0)) < LEAST_ESS:
        text = (
            f"off/ess is {ess:.3f}, the share that an update's rollouts are worth: the policy has moved far from "
            "theirs. Use optim.ess=sqrt, a lower optim.lr, or fewer updates of a step (train.minibatches)."
        )
        yield Cause("ess", text, 1.0 / ess if ess > 0.0 else math.inf)
    if (share := metrics.get("off/token_share", 0.0)) > 0.0 and not reuse_is_answered:
        text = (
            f"off/token_share is {share:.2f}, the share of tokens of earlier weights, and nothing corrects for it: use "
            "correction=tis, or optim.ess=sqrt."
        )
        yield Cause("reuse", text, share)
