"""Which rollouts of a group are trained on: the down-sampling rules of PODS, and the check that every answer passes.

Rules read rewards and nothing else. Rollouts of equal reward are exchangeable: which of them is kept is drawn from the
group's own random stream, so that early samples are never favoured. Advantages are computed elsewhere, afterwards.

PODS: Xu, Savani, Fang, Kolter, "Not All Rollouts are Useful", arXiv 2504.13818.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import partial

import numpy as np
from jaxtyping import Bool, Float, Int

from grpo_cli.interfaces import DownsampleRule
from grpo_cli.support.errors import UserError, whosever
from grpo_cli.types import ScoredGroup


def all_rollouts(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """Keep everything: plain GRPO. Refuses to choose, which is what the other rules are for."""
    size = len(group.rollouts)
    if keep < size:
        raise UserError(
            f"m={keep} is less than n={size}, but downsample=all keeps all; choose downsample=maxvar, maxreward, "
            f"percentile or random, or m={size}"
        )
    return list(range(size))


def maxvar(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """The subset whose rewards vary most (PODS, the max-variance rule): both ends, which teach most.

    For binary rewards it keeps as near to half right and half wrong as the group allows. Variance says nothing about a
    single rollout, so `keep` is at least 2.
    """
    if keep < 2:
        raise UserError(
            f"m={keep} cannot be chosen by downsample=maxvar: one reward has no variance; take m of 2 or more, or "
            "downsample=maxreward or random"
        )
    return max_variance_indices(group.totals, keep, rng).tolist()


def maxreward(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """The largest rewards. A baseline that fails by design: among the best only, little or nothing varies."""
    return max_reward_indices(group.totals, keep, rng).tolist()


def random(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """Uniform without replacement: the baseline that only saves update time."""
    return rng.choice(len(group.rollouts), keep, replace=False).tolist()


def percentile(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """Evenly spaced ranks, so the kept rewards look like the group's own distribution."""
    return percentile_indices(group.totals, keep, rng).tolist()


def median(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """All but one in the middle of the rewards, drawn among equal ones (MC-GRPO, arXiv 2601.22582).

    Its advantage over the median is 0, so that leaving it out changes the divisor of the loss and the cost only.
    """
    size = len(group.rollouts)
    if keep != size - 1:
        raise UserError(f"downsample=median leaves out one of n={size} rollouts, so m must be {size - 1}")
    ordered = np.sort(group.totals)
    middle = np.isin(group.totals, ordered[[(size - 1) // 2, size // 2]])
    left_out = int(rng.choice(np.flatnonzero(middle)))
    return [index for index in range(size) if index != left_out]


median.needs_middle = True  # type: ignore[attr-defined]


def max_variance_indices(
    rewards: Float[np.ndarray, " G"], keep: int, rng: np.random.Generator
) -> Int[np.ndarray, " K"]:
    """Indices of `keep` (2 <= keep <= G) rewards with the largest possible variance, ascending.

    Some best subset is the k largest and the keep - k smallest: the variance is a convex function of each member, so
    moving a member to one end of what is left never lowers it. Only k is to be found. O(G log G), from the sort.
    """
    ordered = np.sort(rewards)
    num_top = _best_num_top(ordered, keep)
    return _take_ends(rewards, ordered, keep - num_top, num_top, rng)


def max_reward_indices(rewards: Float[np.ndarray, " G"], keep: int, rng: np.random.Generator) -> Int[np.ndarray, " K"]:
    """Indices of the `keep` largest rewards, ascending."""
    return _take_ends(rewards, np.sort(rewards), 0, keep, rng)


def percentile_indices(rewards: Float[np.ndarray, " G"], keep: int, rng: np.random.Generator) -> Int[np.ndarray, " K"]:
    """Indices of the order statistics at quantiles (j - 0.5) / keep, j = 1..keep, in ascending order of reward.

    The order statistic at quantile q is the ceil(q * G)-th smallest (the inverse of the empirical distribution). Since
    keep <= G the ranks differ by at least one each, so none is taken twice. Integers throughout: no rounding.
    """
    size = len(rewards)
    halves = 2 * np.arange(1, keep + 1) - 1
    ranks = -(-halves * size // (2 * keep)) - 1
    # Sorting a shuffled copy makes the order within equal rewards uniformly random, whatever sort is used.
    shuffled = rng.permutation(size)
    return shuffled[np.argsort(rewards[shuffled])[ranks]]


def _best_num_top(ordered: Float[np.ndarray, " G"], keep: int) -> int:
    """How many of the `keep` come from the top end when the rest are the smallest: the least k of greatest variance.

    Going from k to k + 1 swaps the largest kept small one, b, for the next large one, t. With d = t - b and S the sum
    of the kept, the sum of squared deviations grows by d * (t + b - (2 S + d) / keep). As k grows, t and b fall and S
    rises, so the second factor only falls: it is positive up to the best k and never after. That k is found by halving,
    and S is carried along, so that all steps together add up each end once. Only first-order sums are taken, of
    rewards around their middle, so that a large offset cannot cancel the differences.
    """
    size = len(ordered)
    middle = ordered[0] / 2 + ordered[-1] / 2
    known, best = 0, keep  # the answer lies in [known, best], and `total` is S for k = known
    total = (ordered[:keep] - middle).sum()
    while known < best:
        k = (known + best) // 2
        entered = (ordered[size - k : size - known] - middle).sum()
        left = (ordered[keep - k : keep - known] - middle).sum()
        entering, leaving = ordered[size - 1 - k] - middle, ordered[keep - 1 - k] - middle
        gap = entering - leaving
        if entering + leaving > (2 * (total + entered - left) + gap) / keep:
            total += entered - left + gap
            known = k + 1
        else:
            best = k
    return known


def _take_ends(
    rewards: Float[np.ndarray, " G"],
    ordered: Float[np.ndarray, " G"],
    num_low: int,
    num_high: int,
    rng: np.random.Generator,
) -> Int[np.ndarray, " K"]:
    """Indices, ascending, of the `num_low` smallest and `num_high` largest rewards; `ordered` is `rewards` ascending.

    Everything beyond the two border values is taken; among the rewards equal to a border as many as are missing are
    drawn at random. The two borders may be one value, whose ties are then drawn from once.
    """
    taken = np.zeros(len(rewards), dtype=bool)
    missing: dict[float, int] = {}
    if num_low:
        border = float(ordered[num_low - 1])
        taken |= rewards < border
        missing[border] = num_low - int(np.searchsorted(ordered, border, side="left"))
    if num_high:
        border = float(ordered[-num_high])
        taken |= rewards > border
        num_above = len(ordered) - int(np.searchsorted(ordered, border, side="right"))
        missing[border] = missing.get(border, 0) + num_high - num_above
    for border, count in missing.items():
        taken |= _draw(rewards == border, count, rng)
    return np.flatnonzero(taken)


def _draw(candidates: Bool[np.ndarray, " G"], count: int, rng: np.random.Generator) -> Bool[np.ndarray, " G"]:
    """A uniformly random subset of exactly `count` of the candidates, as a mask.

    Each candidate tosses the same coin, and surplus ones are put back, or missing ones added, at random. Given its
    size a set drawn by coins is uniform, whatever the coin, so the result is too; and coins are one byte each, which
    for a million equal rewards is many times faster than shuffling their indices.
    """
    total = int(np.count_nonzero(candidates))
    if count == total:
        return candidates
    coins = np.frombuffer(rng.bytes(len(candidates)), dtype=np.uint8)
    drawn = candidates & (coins < 256 * count // total + 1)  # rather too many: then the drawn ones are the pool
    surplus = int(np.count_nonzero(drawn)) - count
    if surplus:
        pool = np.flatnonzero(drawn if surplus > 0 else candidates & ~drawn)
        drawn[rng.choice(pool, abs(surplus), replace=False, shuffle=False)] = surplus < 0
    return drawn


def choose(rule: DownsampleRule, group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """The indices that `rule` keeps, ascending, once they are known to be `keep` distinct ones of this group.

    A group of `keep` rollouts or fewer is kept whole without asking the rule: n = m is plain GRPO under any rule.
    """
    size = len(group.rollouts)
    if keep >= size:
        return list(range(size))
    asked = f"{keep} distinct indices below {size} for prompt {group.prompt.id}"
    fault = f"downsample rule {_name(rule)} was asked for {asked}"
    with whosever(f"{fault} and", getattr(rule, "func", rule)):
        answer = rule(group, keep, rng)
        if not isinstance(answer, Iterable):
            raise UserError(f"{fault} but returned {answer!r}: return a list of {keep} integers")
        answer = list(answer)
    try:
        indices = [operator.index(index) for index in answer]
    except TypeError as error:
        raise UserError(f"{fault} but returned something that is no integer ({error})") from error
    outside = [index for index in indices if not 0 <= index < size]
    if outside:
        raise UserError(f"{fault} but returned {outside[0]}: indices run from 0 to {size - 1}")
    if len(set(indices)) != len(indices):
        twice = next(index for index in indices if indices.count(index) > 1)
        raise UserError(f"{fault} but returned {twice} more than once: each rollout may be kept once")
    if len(indices) != keep:
        raise UserError(f"{fault} but returned {len(indices)} of them: return exactly {keep}")
    return sorted(indices)


def checked(rule: DownsampleRule, group: ScoredGroup, keep: int, rng: np.random.Generator) -> ScoredGroup:
    """The part of `group` that is trained on, in the order of the group: `choose`, applied."""
    return group.take(choose(rule, group, keep, rng))


def _name(rule: DownsampleRule) -> str:
    """What a person would look for: the function's dotted name, also behind `functools.partial`."""
    target = rule.func if isinstance(rule, partial) else rule
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}.{named.__qualname__}"
