"""LightningRL: each reward part is normalised separately, then weighted, so that its scale does not matter.

    A = sum over parts of weight * (x - mean(x)) / (std(x) + eps)

Not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.rules.advantage import Epsilon, StatsOver, grpo, standardised
from grpo_cli.support.errors import UserError, closest
from grpo_cli.types import Reward, ScoredGroup


def per_part(
    group: ScoredGroup, kept: Sequence[int], *, weights: Mapping[str, float | int], stats_over: StatsOver, eps: Epsilon
) -> Float[Tensor, " K"]:
    """Return the weighted sum over reward parts, each (x - mean) / (std + eps) for itself (as LightningRL does), so
    that a part counts by its weight and not by its scale.

    A part weighs what it does in the total, or what `weights` says of it; one that neither names is only logged and
    counts nothing. It is 0 for a rollout that does not have it, or in whose total it is left out. Where nothing is
    known of any part, the total is the only one. A part that does not vary adds nothing.
    """
    rewards = group.rewards
    parts = {part for reward in rewards for part in reward.parts}
    for part in weights.keys() - parts:
        if near := closest(part, parts):  # another group may have a part that this one lacks, but not a misspelt one
            raise UserError(f"advantage.weights.{part} is no part of these rewards{near}")
    of_total = _weights_in_total(rewards)
    counted = {**of_total, **weights}
    if not counted or not any(reward.parts for reward in rewards):
        return grpo(group, kept, stats_over=stats_over, eps=eps)
    advantages = torch.zeros(len(kept), dtype=torch.float64)
    for part in sorted(counted):
        values = torch.tensor([_counted(reward, part, of_total) for reward in rewards], dtype=torch.float64)
        own = values[list(kept)]
        advantages += counted[part] * standardised(own, own if stats_over == "kept" else values, eps)
    return advantages


def _weights_in_total(rewards: Sequence[Reward]) -> dict[str, float]:
    """Return each part's weight in a group's totals; 1 if rewards have none and parts sum to the totals."""
    said = {part: weight for reward in rewards for part, weight in reward.weights.items()}
    if not said and all(math.isclose(sum(reward.parts.values()), reward.total) for reward in rewards):
        return dict.fromkeys((part for reward in rewards for part in reward.parts), 1.0)
    return said


def _counted(reward: Reward, part: str, of_total: Mapping[str, float]) -> float:
    """Return a part's value; 0 where this rollout's total leaves it out, and others of its group do not."""
    left_out = bool(reward.weights) and part in of_total and part not in reward.weights
    return 0.0 if left_out else float(reward.parts.get(part, 0.0))
