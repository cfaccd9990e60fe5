"""The choice of rollouts to train on: plain GRPO's rule, and the check that every rule's answer passes."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import numpy as np

from grpo_cli.interfaces import Downsample
from grpo_cli.support.errors import UserError, own_code_unless_ours
from grpo_cli.support.facts import fact, name_of
from grpo_cli.types import ScoredGroup


def all_rollouts(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """Keep everything: plain GRPO. Refuses m < n, which needs another rule."""
    size = len(group.rollouts)
    if keep < size:
        raise UserError(f"downsample=all keeps all n={size}, not m={keep}: use maxvar, maxreward, percentile or random")
    return list(range(size))


def choose(rule: Downsample, group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """Return the indices that `rule` keeps, ascending, once they are known to be `keep` distinct ones of this group.

    A group of `keep` rollouts or fewer is kept whole without the rule: n = m is plain GRPO under any rule.
    """
    size = len(group.rollouts)
    if keep >= size:
        return list(range(size))
    with own_code_unless_ours(f"downsample {name_of(rule)}", getattr(rule, "func", rule)):
        answer = rule(group, keep, rng)
        answer = list(answer) if isinstance(answer, Iterable) else answer
    try:
        indices = [operator.index(index) for index in answer]
    except TypeError:
        indices = []
    least = 1 if fact(rule, "keeps_fewer") else keep
    if not (least <= len(set(indices)) == len(indices) <= keep and 0 <= min(indices) <= max(indices) < size):
        raise UserError(
            f"downsample {name_of(rule)} returned {indices or answer!r:.40} for prompt {group.prompt.id}: return "
            f"{'1 to ' if least < keep else ''}{keep} different indices from 0 to {size - 1}"
        )
    return sorted(indices)
