"""AERO: rollouts until a prompt is solved once, wrong answers in proportion to right ones, and a baseline that leaves
no group without an advantage (Zhang et al., "Train Less, Learn More", arXiv 2602.14338).

    collector:  n rollouts of each prompt; while none is right, `more` at a time, until one is or there are `most`
    downsample: all c right ones, min(w, k max(c, 1)) of the w wrong ones; beyond m, wrong ones are left out until half
                of m is theirs, and then right ones
    advantage:  r - (a + c) / (a + b + N): c of N rollouts are right, Beta(a, b) is what was known before

Read from the abstract and secondary sources. Ours: all numbers, who is left out beyond m, the k wrong answers that are
kept of a prompt that was never solved, and that N may be the kept rollouts. All three look at right and wrong alone, so
that a prompt's expected gradient keeps the direction of its policy gradient.

Measured: docs/studies.md (the rule is as good as maximal variance and trains on fewer tokens; no gain seen of rounds
and baseline; embedded model).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from grpo_cli.interfaces import StepRollouts, facts
from grpo_cli.rules.advantage import StatsOver, compared
from grpo_cli.support.errors import UserError
from grpo_cli.types import ScoredGroup

Prior = Annotated[float, Field(gt=0)]
MOST_FURTHER = 200  # rounds, one after the other
ROUNDING = 1e-6  # of a sum of weighted parts


@dataclass(frozen=True)
class Aero:
    """`n` rollouts of each prompt, then `more` at a time of those that none has solved, until one does or there are
    `most` (None: 2n). Each further round waits for its slowest rollout."""

    more: Annotated[int, Field(ge=1)]
    most: int | None

    def at_once(self, n: int, prompts: int) -> int:
        return max(n, min(self.more, (self.most or 2 * n) - n)) * prompts

    def __call__(self, step: StepRollouts) -> list[ScoredGroup]:
        """Raise UserError if `most` is less than `n` or takes too many rounds."""
        more, most = self.more, 2 * step.n if self.most is None else self.most
        if most < step.n:
            raise UserError(f"collector.most={most} is less than n={step.n}: raise it, or lower n")
        if (rounds := -((step.n - most) // more)) > MOST_FURTHER:
            raise UserError(f"collector.most={most} is {rounds} rounds, {MOST_FURTHER} at most: raise collector.more")
        left, size, made = list(step.pick(step.prompts)), 0, 0
        first = len(left) * step.n
        while left and size < most and not (size and step.at_limit):
            count = min(more, most - size) if size else step.n
            size, made = size + count, made + count * len(left)
            scored = step.score(step.generate((prompt, count) for prompt in left))
            left = [group.prompt for group in scored if not _right(group, "collector").any()]
        step.note("later_rounds", 1 - first / made)
        step.note("unsolved", len(left))
        return step.score(step.groups)


@facts(keeps_fewer=True)
def right_and_some_wrong(
    group: ScoredGroup, keep: int, rng: np.random.Generator, *, k: Annotated[float, Field(gt=0)]
) -> list[int]:
    """Return all right answers and `k` times as many wrong ones, sampled at random; at most `keep`, often fewer.

    Where they are more than `keep`, wrong ones are left out until half of `keep` is theirs, and then right ones.
    """
    right = _right(group, "downsample")
    num_right, num_wrong = int(right.sum()), int((~right).sum())
    wrong = min(num_wrong, max(1, round(k * max(num_right, 1))))
    if num_right + wrong > keep:
        num_right = min(num_right, keep - min(wrong, keep // 2))
        wrong = keep - num_right
    drawn_right = rng.choice(np.flatnonzero(right), num_right, replace=False)
    drawn_wrong = rng.choice(np.flatnonzero(~right), wrong, replace=False)
    return [*drawn_right.tolist(), *drawn_wrong.tolist()]


def beta(
    group: ScoredGroup, kept: Sequence[int], *, prior_right: Prior, prior_wrong: Prior, stats_over: StatsOver
) -> Float[Tensor, " K"]:
    """Return r - (a + c) / (a + b + N), never 0 for a reward of 0 or 1. UserError for one below 0 or above 1; one
    between counts as such a part of a right answer."""
    require_shares("advantage=beta", group)
    rewards, reference = compared(group, kept, stats_over)
    solved = (prior_right + reference.sum()) / (prior_right + prior_wrong + len(reference))
    return rewards - solved


def require_shares(rule: str, group: ScoredGroup) -> None:
    """Raise UserError for a reward outside [0, 1]."""
    outside = group.totals[(group.totals < -ROUNDING) | (group.totals > 1 + ROUNDING)]
    if len(outside):
        raise UserError(f"{rule} takes rewards from 0 to 1, not {outside[0]:g}: change task.weights or the advantage")


def _right(group: ScoredGroup, asked_by: str) -> Bool[np.ndarray, " G"]:
    """Return which answers are right. UserError where an answer is neither right nor wrong."""
    for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
        if (grade := reward.parts.get(reward.answer_part, reward.total)) not in (0.0, 1.0):
            raise UserError(
                f"{asked_by}=aero counts right answers (1) and wrong ones (0), and sample {rollout.request.sample} of "
                f"prompt {group.prompt.id} is graded {grade:g}: let the reward grade with 0 or 1, or use "
                f"{'collector=equal' if asked_by == 'collector' else 'downsample=maxvar'}"
            )
    return np.array([reward.solved for reward in group.rewards], dtype=bool)
