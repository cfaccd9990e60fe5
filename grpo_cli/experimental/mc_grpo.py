"""MC-GRPO, no difference from the mean seen here: advantages over the median of an odd group, whose middle rollout need
not be trained on (arXiv 2601.22582).

    A = (r - median) / (scale + floor)

Measured: docs/studies.md (n = 3 and 9, divided by the deviation; the form of the release was not).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_cli.rules.advantage import StatsOver, compared, varies
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import OneOf
from grpo_cli.types import ScoredGroup

Scale = Annotated[str, OneOf(("mad", "std", "none"))]
Floor = Annotated[float, Field(gt=0)]


def all_but_the_middle(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """Return all but one in the middle, sampled among equal ones (MC-GRPO, arXiv 2601.22582).

    Its advantage over the median is 0, so that leaving it out changes the divisor of the loss and the cost only.
    """
    size = len(group.rollouts)
    if keep != size - 1:
        raise UserError(f"downsample=median leaves out one of n={size} rollouts, so m must be {size - 1}")
    middle = np.isin(group.totals, np.sort(group.totals)[[(size - 1) // 2, size // 2]])
    left_out = int(rng.choice(np.flatnonzero(middle)))
    return [index for index in range(size) if index != left_out]


def median(
    group: ScoredGroup, kept: Sequence[int], *, scale: Scale, floor: Floor, stats_over: StatsOver
) -> Float[Tensor, " K"]:
    """Return (r - median) / (scale + floor) of odd groups (MC-GRPO, arXiv 2601.22582).

    One rollout is the middle, with an advantage of 0 (`downsample=median` leaves it out). The scale is `std` (unbiased)
    or `mad`, the median distance from the median; `none` does not divide. Where rejections leave an even number, the
    median is the mean of the two in the middle.
    """
    rewards, reference = compared(group, kept, stats_over)
    if not varies(reference):
        return torch.zeros_like(rewards)
    middle = float(np.median(reference))  # the mean of two in the middle, where `Tensor.median` is the lower
    distances = rewards - middle
    if scale != "none":
        spread = float(reference.std(correction=1)) if scale == "std" else float(np.median((reference - middle).abs()))
        distances = distances / (spread + floor)
    return distances
