"""Reads each step's metrics and warns, naming the key to change, when a run is not learning what it should.

It changes nothing and stops nothing. Each cause is told once, and again only when it has become twice as bad; what
follows from another cause is not told beside it. What matters most comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

TRUNCATED_SHARE = 0.25  # ours: PODS's and TRL's runs lose a few per cent
NEARLY_ALL = 0.75  # truncated: then it is no wonder that rewards are equal
ZERO_STD_SHARE = 0.9
RATIO_RANGE = (0.9, 1.1)
RATIOS = ("mismatch/ratio_mean", "mismatch_trained/ratio_mean")  # of which a step has one at most
EQUAL_STEPS = 5
FEW_PROBLEMS_STEPS = 50
FEWEST_HELD_OUT = 20  # of so many, the 95 % interval of an accuracy is up to 0.4 wide
TWICE = 2.0
LEAST_ESS = 0.1
FIRST_ENTROPIES = 5  # steps, whose mean is what a run began with
ENTROPY_LEFT = 0.1  # of that
LEAST_ENTROPY = 0.05  # nats
ALIKE_SHARE = 0.5  # of the groups
SOLVED_SHARE = 0.8


class HealthCheck:
    """Remembers which conditions hold, how long all rewards have been equal, and how many steps there were.

    `reuse_is_answered`: a correction looks at how far tokens are from the policy, or the learning rate does.
    `weighed_parts`: those of the reward that the advantage was told to weigh by name.
    """

    def __init__(self, reuse_is_answered: bool = False, weighed_parts: Iterable[str] = ()) -> None:
        self._reuse_is_answered = reuse_is_answered
        self._unseen_parts = list(weighed_parts)
        self._told: dict[str, float] = {}  # how bad each cause was when it was last told
        self._equal_steps = self._steps = 0
        self._entropies: list[float] = []  # the first ones

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """The warnings that are new with this step's metrics, the most important first."""
        found = {
            "truncated": _truncated(metrics),
            "equal": self._all_equal(metrics),
            "zero_std": _zero_std(metrics),
            "mismatch": _mismatch(metrics),
            "ess": _ess(metrics),
            "entropy": self._entropy(metrics),
            "reuse": self._reuse(metrics),
            "weights": self._weigh_nothing(metrics),
            "few_problems": self._few_problems(metrics),
            "few_held_out": _few_held_out(metrics),
        }
        if metrics.get("response/truncated", 0.0) > NEARLY_ALL:
            found["equal"] = found["zero_std"] = ""
        if found["equal"]:
            found["zero_std"] = ""
        return [text for name, text in found.items() if text and self._is_worse(name, metrics)]

    def _is_worse(self, name: str, metrics: Mapping[str, float]) -> bool:
        """Whether a cause is to be told: it never was, or is twice as bad as it was then."""
        now = {**_how_bad(metrics), "equal": float(self._equal_steps)}.get(name, 1.0)
        if name in self._told and not now >= TWICE * self._told[name] > 0.0:
            return False
        again = name in self._told and now == self._told[name]  # both are endless
        self._told[name] = now
        return not again

    def _all_equal(self, metrics: Mapping[str, float]) -> str | None:
        if "reward/std" not in metrics:
            return None
        self._equal_steps = self._equal_steps + 1 if metrics["reward/std"] == 0.0 else 0
        if self._equal_steps < EQUAL_STEPS:
            return ""
        return (
            f"every reward of the last {self._equal_steps} steps was {metrics.get('reward/mean', float('nan')):g}, so "
            "nothing was learnt. Read a few completions in rollouts.jsonl: if they look right, the task's answers or "
            "its judge are wrong (task); if not, choose easier problems (task), a stronger model (model.path) or a "
            "higher sampling.temperature."
        )

    def _reuse(self, metrics: Mapping[str, float]) -> str | None:
        share = metrics.get("off/token_share")
        if share is None:
            return None
        if share == 0.0 or self._reuse_is_answered:
            return ""
        return (
            f"off/token_share is {share:.2f}: that share of the tokens was drawn by weights of earlier updates, and "
            "nothing answers for it. Reweigh them (correction=tis), let the learning rate follow (optim.ess=sqrt), or "
            "train on the new ones alone (credit=fresh)."
        )

    def _weigh_nothing(self, metrics: Mapping[str, float]) -> str | None:
        if "reward/mean" not in metrics:
            return None
        self._unseen_parts = [part for part in self._unseen_parts if f"reward/{part}" not in metrics]
        if not self._unseen_parts:
            return ""
        keys = " and ".join(f"advantage.weights.{part}" for part in self._unseen_parts)
        return (
            f"{keys} weighs nothing so far: no rollout's reward has a part of that name. Correct it to one of the "
            "parts that metrics.jsonl has as reward/<part>, or leave it out."
        )

    def _entropy(self, metrics: Mapping[str, float]) -> str | None:
        """A policy that solves its problems is certain with good reason. One that is certain, draws the same answers
        over and over and is still wrong has stopped exploring."""
        entropy = metrics.get("policy/entropy")
        if entropy is None:
            return None
        if len(self._entropies) < FIRST_ENTROPIES:
            self._entropies.append(entropy)
            return ""
        first = sum(self._entropies) / len(self._entropies)
        alike = metrics.get("group/zero_std", 0.0) >= ALIKE_SHARE
        solved = metrics.get("reward/correct", metrics.get("reward/mean", 1.0))
        if entropy >= min(LEAST_ENTROPY, ENTROPY_LEFT * first) or not alike or solved >= SOLVED_SHARE:
            return ""
        return (
            f"policy/entropy is {entropy:.3f} nats, and was {first:.3f} in the first steps: the policy hardly explores "
            f"any more, while group/zero_std is {metrics['group/zero_std']:.2f} and only {solved:.2f} is solved. Lower "
            "optim.lr, keep it near its start (loss.kl_coef), clip less from above (loss=dapo, or a higher "
            "loss.clip_high), or raise sampling.temperature, from a checkpoint before this."
        )

    def _few_problems(self, metrics: Mapping[str, float]) -> str | None:
        if "prompts/distinct" not in metrics:
            return None
        self._steps += 1
        met, of_step = metrics["prompts/distinct"], metrics["collect/problems"]
        if self._steps < FEW_PROBLEMS_STEPS or met >= 2 * of_step:
            return ""
        return (
            f"prompts/distinct is {met:.0f} with {of_step:.0f} problems a step: the run trains on the same few over "
            "and over, and may learn them by heart. Give the task more problems (task.train_problems), or choose a "
            "curriculum that looks at more of them (curriculum=epochs, or a smaller curriculum.pool)."
        )


def _how_bad(metrics: Mapping[str, float]) -> dict[str, float]:
    """A number of each cause that doubles as it becomes twice as bad; what has none is told once."""
    ratio = next((metrics[name] for name in RATIOS if name in metrics), 1.0)
    off = abs(math.log(ratio)) if 0.0 < ratio < math.inf else math.inf
    worth = metrics.get("off/ess", 1.0)
    return {
        "truncated": metrics.get("response/truncated", 0.0),
        "mismatch": off,
        "ess": 1.0 / worth if worth > 0.0 else math.inf,
        "reuse": metrics.get("off/token_share", 0.0),
    }


# Each condition answers a warning, "" when all is well, or None when its metric was not measured.


def _truncated(metrics: Mapping[str, float]) -> str | None:
    share = metrics.get("response/truncated")
    if share is None or share <= TRUNCATED_SHARE:
        return None if share is None else ""
    return (
        f"response/truncated is {share:.2f}: that share of the rollouts was cut off before it ended, so its reward "
        "says little. Raise sampling.max_new_tokens."
    )


def _few_held_out(metrics: Mapping[str, float]) -> str | None:
    count = metrics.get("eval/problems")
    if count is None or count >= FEWEST_HELD_OUT:
        return None if count is None else ""
    return (
        f"eval/problems is {count:.0f}: the accuracy on so few held-out problems says little, look at its interval. "
        "Hold out more (eval.problems, task.eval_path, or task.eval_fraction)."
    )


def _zero_std(metrics: Mapping[str, float]) -> str | None:
    share = metrics.get("group/zero_std")
    if share is None or share <= ZERO_STD_SHARE:
        return None if share is None else ""
    return (
        f"group/zero_std is {share:.2f}: in that share of the groups all rewards are equal, and such a group teaches "
        f"nothing (reward/mean is {metrics.get('reward/mean', float('nan')):.2f}). Raise n or sampling.temperature, or "
        "choose problems that are neither too easy nor too hard (task)."
    )


def _ess(metrics: Mapping[str, float]) -> str | None:
    share = metrics.get("off/ess")
    if share is None or share >= LEAST_ESS:
        return None if share is None else ""
    return (
        f"off/ess is {share:.3f}: the rollouts of an update are worth that share of their number, as the policy has "
        "gone far from what drew them. Let the learning rate follow (optim.ess=sqrt), lower optim.lr, make fewer "
        "updates of a step (train.epochs, train.minibatches), or use less that is old again."
    )


def _mismatch(metrics: Mapping[str, float]) -> str | None:
    name = next((name for name in RATIOS if name in metrics), None)
    low, high = RATIO_RANGE
    if name is None:
        return None
    ratio = metrics[name]
    if low <= ratio <= high:  # false for NaN, which is no less of a problem
        return ""
    return (
        f"{name} is {ratio:.3f}, outside {low}-{high}: the sampler and the trained policy disagree. "
        "Choose a correction (correction=tis), set sampling.top_p=1 and sampling.top_k=0, compute in full precision "
        "(model.dtype=float32 model.autocast=none), or evict fewer KV entries (sparsity)."
    )
