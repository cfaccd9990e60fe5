"""MC-GRPO, no difference from the mean seen here: advantages over the median of an odd group, whose middle rollout need
not be trained on (arXiv 2601.22582).

    A = (r - median) / (scale + floor)

Measured: scripts/reproduce/frontier_a.md (n = 3 and 9, divided by the deviation; the form of the release was not).
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.rules.advantage import compared_rewards, varies
from grpo_cli.support.errors import UserError
from grpo_cli.types import ScoredGroup


def all_but_the_middle(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
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


all_but_the_middle.needs_middle = True  # type: ignore[attr-defined]


def median(
    kept_rewards: Float[Tensor, " K"], group_rewards: Float[Tensor, " G"], *, scale: str, floor: float, stats_over: str
) -> Float[Tensor, " K"]:
    """(r - median) / (scale + floor), for groups of odd size (MC-GRPO, arXiv 2601.22582).

    One rollout is the middle, with an advantage of 0 (`downsample=median` leaves it out). The scale is `std` (unbiased)
    or `mad`, the median distance from the median; `none` does not divide. Where rejections leave an even number, the
    median is the mean of the two in the middle.
    """
    if scale not in ("mad", "std", "none"):
        raise UserError(f"advantage.scale={scale} is unknown: use mad, std or none")
    if not floor > 0:
        raise UserError(f"advantage.floor={floor} must be more than 0: a median distance of 0 is divided by otherwise")
    reference = compared_rewards(kept_rewards, group_rewards, stats_over)
    if not varies(reference):
        return torch.zeros_like(kept_rewards)
    middle = _median(reference)
    distances = kept_rewards.double() - middle
    if scale != "none":
        spread = reference.std(correction=1) if scale == "std" else _median((reference - middle).abs())
        distances = distances / (spread + floor)
    return distances.to(kept_rewards.dtype)


median.needs_middle = True  # type: ignore[attr-defined]


def _median(values: Float[Tensor, " G"]) -> Float[Tensor, ""]:
    """The mean of the two in the middle, which are one where their number is odd. (`Tensor.median` is the lower.)"""
    ordered = values.sort().values
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2
