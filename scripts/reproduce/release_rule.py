"""Max-variance down-sampling as the multi-GPU release of PODS computes it, for the study of what that costs.

    grpo train n=64 m=16 downsample._target_=release_rule.maxvar_release        # in this folder

The release (YixuanEvenXu/pods@187f43b, open-r1/src/open_r1/grpo_trainer.py) tries so many of the highest rewards with
so many of the lowest, and writes the best found so far into a view of the sorted order that later candidates are cut
from. So that order is spoilt, an index may come twice, and what is kept is often not of maximal variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import pvariance

from grpo_cli.types import ScoredGroup


def spoilt_order(rewards: Sequence[float], keep: int) -> list[int]:
    """The order at the end: its first `keep` are what the release keeps, an index perhaps twice.

    >>> spoilt_order([0.0, 0.1, 0.4, 1.0], 2)
    [2, 3, 2, 3]
    """
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    best = pvariance([rewards[i] for i in order[:keep]])
    for high in range(keep, -1, -1):
        found = [*order[len(order) - high :], *order[: keep - high]]
        variance = pvariance([rewards[i] for i in found])
        if variance > best:
            best, order[:keep] = variance, found
    return order


def maxvar_release(group: ScoredGroup, keep: int, rng: Random) -> list[int]:
    """As the release, but that a rollout is kept once: in place of its second time comes the next of the order, and
    then of the rest."""
    order = spoilt_order([reward.total for reward in group.rewards], keep)
    return sorted(list(dict.fromkeys([*order, *range(len(group.rewards))]))[:keep])
