"""Rollouts where more of them would narrow most what is not known of a problem."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from grpo_cli.collect.counts import hand_out, in_proportion
from grpo_cli.errors import UserError
from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.intervals import student_95
from grpo_cli.types import GroupRequest, Round


def ci(collection: Collection, *, rounds: int, most: int | None, explore: float) -> Rounds:
    """As many rollouts as a plain step has, in `rounds` parts; after the first, which all problems share alike, each
    goes to where it narrows the interval of the solved share most (XRPO, arXiv 2510.06672).

    What the k-th rollout of a problem is worth: `narrowing`, and explore * sqrt(ln K / k) with K rollouts so far in the
    step. The deviation is that of (solved + 1) of (tried + 2), since one answer says nothing of it.
    """
    n, prompts = collection.n, collection.prompts
    room = 2 * n if most is None else most
    _check(rounds, room, explore, n)
    budget, rng = n * prompts, collection.rng
    first = min(budget, max(2 * prompts, budget // rounds))
    begun = in_proportion(np.ones(prompts), first, 2, rng)
    picked = collection.pick(prompts)
    groups = yield Round(tuple(GroupRequest(prompt, count) for prompt, count in zip(picked, begun, strict=True)))
    for left in range(rounds - 1, 0, -1):
        made = sum(len(group.rollouts) for group in groups)
        part = (budget - made) // left
        if not part:
            continue
        have = [len(group.rollouts) for group in groups]
        solved = [scored.solved for scored in collection.score(groups)]
        gains = [_gains(right, tried, made, room, explore) for right, tried in zip(solved, have, strict=True)]
        counts = hand_out(gains, have, part, rng)
        more = zip(groups, counts, have, strict=True)
        groups = yield Round(tuple(GroupRequest(g.prompt, new - old) for g, new, old in more if new > old))
    return None


def _gains(solved: int, tried: int, made: int, most: int, explore: float) -> list[float]:
    """What a problem's k-th rollout is worth, for k up to `most`; nobody asks about those that it has."""
    share = (solved + 1) / (tried + 2)
    deviation = math.sqrt(share * (1 - share))
    worth = [
        deviation * narrowing(k - 1) + explore * math.sqrt(math.log(made) / (k - 1)) for k in range(tried + 1, most + 1)
    ]
    return [0.0] * (min(tried, most) + 1) + worth


@cache
def narrowing(count: int) -> float:
    """By how much one more than `count` answers (2 or more) of deviation 1 narrow half the 95 % interval of their mean,
    t_{.975} / sqrt(count)."""
    return _half_width(count) - _half_width(count + 1)


def _half_width(count: int) -> float:
    return student_95(count - 1) / math.sqrt(count)


def _check(rounds: int, most: int, explore: float, n: int) -> None:
    if rounds < 1:
        raise UserError(f"collector.rounds={rounds} must be at least 1")
    if most < n:
        raise UserError(
            f"collector.most={most} is less than n={n}, the mean size of a group: take collector.most of {n} or more"
        )
    if not explore >= 0:
        raise UserError(f"collector.explore={explore} must be at least 0: it favours problems that were tried little")
