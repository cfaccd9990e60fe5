"""DARS, a null result here: a second round of rollouts for prompts that were hard in the first (arXiv 2508.13755).

    with p = max(solved, 1/2) / n < 1/2, and w = 1 (equal) or 2 (1 - p) (hard):
    rollouts = ceil(w n / S), at most `most`;  S = 4 p (1 - p), or 2 sqrt(p (1 - p)) with divided advantages

Measured: docs/studies.md (lower on average, and confounded: fewer steps at equal tokens).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isqrt
from typing import Annotated, ClassVar

from grpo_cli.interfaces import StepRollouts
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import OneOf
from grpo_cli.types import ScoredGroup


@dataclass(frozen=True)
class Dars:
    """`n` rollouts of each prompt, then more of those that fewer than half of them solved (DARS, arXiv 2508.13755).

    A group's advantages add up, without their signs, to less the rarer its right answers are; more rollouts make up
    for that (see `missing`). A prompt that stays unsolved, or was solved by all, still teaches nothing.
    """

    most: int
    weighting: Annotated[str, OneOf(("equal", "hard"))]
    divided: bool

    unequal: ClassVar[bool] = True

    def at_once(self, n: int, prompts: int) -> int:
        return max(n, self.most - n) * prompts

    def __call__(self, step: StepRollouts) -> list[ScoredGroup]:
        if self.most < step.n:
            raise UserError(f"collector.most={self.most} is less than n={step.n}: raise it, or lower n")
        groups = step.score(step.generate((prompt, step.n) for prompt in step.pick(step.prompts)))
        more = [missing(group.solved, step.n, self.most, self.weighting, self.divided) for group in groups]
        step.note("second_round", sum(more) / (step.n * len(groups) + sum(more)))
        return step.score(step.generate((group.prompt, count) for group, count in zip(groups, more, strict=True)))


def missing(solved: int, size: int, most: int, weighting: str, divided: bool) -> int:
    """Return how many rollouts a group of `size` lacks, so that it has at most `most`.

    With p the solved share, a rollout adds S = 2p(1-p) to the sum of the advantages without their signs (undivided), or
    S = 2 sqrt(p(1-p)) (divided by the deviation), which is largest at p = 1/2, where a group has size * S in all.
    `weighting=equal` raises every harder group to that; `hard` to 2(1-p) times as much. No right answer counts as half
    a one. In fractions: floating point would ask for one too many where the answer is whole.
    """
    share = Fraction(max(2 * solved, 1), 2 * size)
    if 2 * share >= 1:
        return 0
    emphasis = 2 * (1 - share) if weighting == "hard" else Fraction(1)
    variance = share * (1 - share)
    if divided:
        squared = (emphasis * size) ** 2 / (4 * variance)  # of size * emphasis / S
        wanted = isqrt(ceil(squared) - 1) + 1
    else:
        wanted = ceil(emphasis * size / (4 * variance))
    return min(wanted, most) - size
