"""Rollouts in proportion to the deviation of a problem's outcomes.

The square root is what the theory of Rollout-GDRO (arXiv 2601.19280) comes to: with a fixed number of rollouts, the
variance of a step's gradient is least in this proportion. The paper itself learns its allocation with a bandit whose
fixed point this is.
"""

from __future__ import annotations

import numpy as np

from grpo_cli.collect.apportion import in_proportion
from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.methods.mixed import check_decay
from grpo_cli.support.errors import UserError
from grpo_cli.types import GroupRequest, Round

UNSEEN = 0.5  # the share that a problem is taken to be solved with before its first visit
FEWEST = 2  # rollouts of a problem; one has nothing to be compared with


def by_deviation(collection: Collection, *, floor: float, least: int, decay: float) -> Rounds:
    """In proportion to sqrt(p(1-p)), which the variance of a step's gradient is least with, at least `least` each.

    p is the decayed mean of the problem's earlier visits, 1/2 before the first; `floor` is the least deviation.
    """
    _check(floor, least, decay, collection.n)
    prompts = collection.pick(collection.prompts)
    rates = np.array([_rate(collection, prompt.id, decay) for prompt in prompts])
    shares = np.maximum(np.sqrt(rates * (1 - rates)), floor)
    counts = in_proportion(shares, collection.n * len(prompts), least, collection.rng)
    yield Round(tuple(GroupRequest(prompt, count) for prompt, count in zip(prompts, counts, strict=True)))
    return None


def _rate(collection: Collection, problem: str, decay: float) -> float:
    known = collection.history.rate(problem, decay)
    return UNSEEN if known is None else known


def _check(floor: float, least: int, decay: float, n: int) -> None:
    if not 0 < floor <= 0.5:
        raise UserError(f"collector.floor={floor} must be more than 0 and at most 0.5, the largest deviation there is")
    if least < FEWEST:
        raise UserError(f"collector.least={least} must be at least 2: one rollout has nothing to be compared with")
    if least > n:
        raise UserError(f"collector.least={least} is more than n={n}, the mean size of a group: lower it")
    check_decay(decay)
