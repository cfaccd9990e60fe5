"""PODS: generate n rollouts, train on the m whose rewards vary most (arXiv 2504.13818), and the rules that the paper
compares it with.

Rollouts of equal reward are exchangeable: which of them is kept is drawn from the group's own random stream, so that
early samples are never favoured.

    kept = the m of n rewards with the largest variance: the k largest and the m - k smallest, for the best k

Measured: docs/studies.md (embedded model and 135 M).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from grpo_cli.support.errors import UserError
from grpo_cli.types import ScoredGroup


def maxvar(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """Return the subset whose rewards vary most (PODS, the max-variance rule): both ends, which teach most.

    For binary rewards it keeps as near to half right and half wrong as the group allows. Variance says nothing about a
    single rollout, so `keep` is at least 2.

    Some best subset is the k largest and the keep - k smallest: the variance is a convex function of each member, so
    moving a member to one end of what is left never lowers it. Only k is to be found. O(G log G), from the sort.
    """
    if keep < 2:
        raise UserError(f"downsample=maxvar cannot choose m={keep}: one reward has no variance; take 2 or more")
    ordered = np.sort(group.totals)
    num_top = _best_num_top(ordered, keep)
    return _take_ends(group.totals, ordered, keep - num_top, num_top, rng).tolist()


def maxreward(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """Return the largest rewards. A baseline that fails by design: among the best only, little or nothing varies."""
    return _take_ends(group.totals, np.sort(group.totals), 0, keep, rng).tolist()


def random(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """Draw uniformly without replacement: the baseline that only saves update time."""
    return rng.choice(len(group.rollouts), keep, replace=False).tolist()


def percentile(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """Return evenly spaced ranks, so that the kept rewards look like the group's own distribution.

    They are the order statistics at quantiles (j - 0.5) / keep, j = 1..keep; that at quantile q is the ceil(q * G)-th
    smallest (the inverse of the empirical distribution). Since keep <= G the ranks differ by at least one each, so none
    is taken twice. Integers throughout: no rounding.
    """
    size = len(group.totals)
    halves = 2 * np.arange(1, keep + 1) - 1
    ranks = -(-halves * size // (2 * keep)) - 1
    # Sorting a shuffled copy makes the order within equal rewards uniformly random, whatever sort is used.
    shuffled = rng.permutation(size)
    return shuffled[np.argsort(group.totals[shuffled])[ranks]].tolist()


def _best_num_top(ordered: Float[np.ndarray, " G"], keep: int) -> int:
    """Return how many of the `keep` come from the top end when the rest are the smallest: the least k of greatest
    variance.

    Going from k to k + 1 swaps the largest kept small one, b, for the next large one, t. With d = t - b and S the sum
    of the kept, the sum of squared deviations grows by d * (t + b - (2 S + d) / keep). As k grows, t and b fall and S
    rises, so the second factor only falls: it is positive up to the best k and never after. Only first-order sums are
    taken, of rewards around their middle, so that a large offset cannot cancel the differences.
    """
    around = ordered - (ordered[0] / 2 + ordered[-1] / 2)
    entering, leaving = around[::-1][:keep], around[:keep][::-1]  # t and b of each k
    gaps = entering - leaving
    sums = around[:keep].sum() + np.append(0.0, gaps[:-1].cumsum())
    grows = entering + leaving > (2 * sums + gaps) / keep
    return int(np.logical_and.accumulate(grows).sum())


def _take_ends(
    rewards: Float[np.ndarray, " G"], ordered: Float[np.ndarray, " G"], low: int, high: int, rng: np.random.Generator
) -> Int[np.ndarray, " K"]:
    """Return indices, ascending, of the `low` smallest and `high` largest of `rewards`, sorted in `ordered`.

    Everything beyond the two border values is taken; among the rewards equal to a border as many as are missing are
    drawn at random. The two borders may be one value, whose ties are then drawn from once.
    """
    taken = np.zeros(len(rewards), dtype=bool)
    missing: dict[float, int] = {}
    if low:
        border = float(ordered[low - 1])
        taken |= rewards < border
        missing[border] = low - int(np.searchsorted(ordered, border, side="left"))
    if high:
        border = float(ordered[-high])
        taken |= rewards > border
        num_above = len(ordered) - int(np.searchsorted(ordered, border, side="right"))
        missing[border] = missing.get(border, 0) + high - num_above
    for border, count in missing.items():
        taken[rng.choice(np.flatnonzero(rewards == border), count, replace=False, shuffle=False)] = True
    return np.flatnonzero(taken)
