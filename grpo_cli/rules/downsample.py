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

from grpo_cli.interfaces import DownsampleRule
from grpo_cli.support.errors import UserError, own_code_unless_ours
from grpo_cli.types import ScoredGroup


def all_rollouts(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """Keep everything: plain GRPO. Refuses m < n, which needs another rule."""
    size = len(group.rollouts)
    if keep < size:
        raise UserError(
            f"m={keep} is less than n={size}, but downsample=all keeps all; choose downsample=maxvar, maxreward, "
            f"percentile or random, or m={size}"
        )
    return list(range(size))


def choose(rule: DownsampleRule, group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """The indices that `rule` keeps, ascending, once they are known to be `keep` distinct ones of this group.

    A group of `keep` rollouts or fewer is kept whole without asking the rule: n = m is plain GRPO under any rule. One
    that says `keeps_fewer` may keep any number from 1 to `keep`.
    """
    size = len(group.rollouts)
    if keep >= size:
        return list(range(size))
    asked = f"{keep} distinct indices below {size} for prompt {group.prompt.id}"
    fault = f"downsample rule {_name(rule)} was asked for {asked}"
    with own_code_unless_ours(f"{fault} and", getattr(rule, "func", rule)):
        answer = rule(group, keep, rng)
        if not isinstance(answer, Iterable):
            raise UserError(f"{fault} but returned {answer!r}: return a list of {keep} integers")
        answer = list(answer)
    try:
        indices = [operator.index(index) for index in answer]
    except TypeError as error:
        raise UserError(f"{fault} but returned something that is not an integer ({error})") from error
    outside = [index for index in indices if not 0 <= index < size]
    if outside:
        raise UserError(f"{fault} but returned {outside[0]}: indices run from 0 to {size - 1}")
    if len(set(indices)) != len(indices):
        twice = next(index for index in indices if indices.count(index) > 1)
        raise UserError(f"{fault} but returned {twice} more than once: each rollout may be kept once")
    fewer = getattr(getattr(rule, "func", rule), "keeps_fewer", False)
    if len(indices) != keep and not (fewer and 0 < len(indices) < keep):
        raise UserError(f"{fault} but returned {len(indices)} of them: return {'1 to' if fewer else 'exactly'} {keep}")
    return sorted(indices)


def _name(rule: DownsampleRule) -> str:
    """What a person would look for: the function's dotted name, also behind `functools.partial`."""
    target = rule.func if isinstance(rule, partial) else rule
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}.{named.__qualname__}"
