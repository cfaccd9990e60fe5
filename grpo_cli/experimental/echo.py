"""ECHO (arXiv 2602.02150): completions whose ends are certain move less (`loss=echo`).

    PPO's clip with eps_i = least + (most - least) sigmoid(slope (1 - mean of the last C_t of completion i))

C_t is the probability of token t under the policy before the step. Constants and formulas are the official release's.
Of the paper are left out the weights of uncertain tokens (they wait for advantages per token), the tree of branching
rollouts, which its script for AIME has switched off, and training on the most frequent answer as the right one.

Measured: docs/studies.md (the loss, with labels by majority: null).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_cli.rules.loss import Clipped, Terms, aggregate, bounded_ratio, log_policy_ratio, masked_float
from grpo_cli.support.ranges import Count
from grpo_cli.types import Batch, LossOutput, Totals


@dataclass(frozen=True)
class Echo(Clipped):
    """GRPO, but that a completion's ratios may be from the mean of `clip_low` and `clip_high` up to `clip_high` away
    from 1, either way: the less, the more certain the old policy was of its last `tail` tokens (ECHO, arXiv
    2602.02150)."""

    slope: Annotated[float, Field(ge=0)]
    tail: Count

    def __call__(self, logprobs: Float[Tensor, "N"], batch: Batch, totals: Totals) -> LossOutput:
        """Return what `Clipped` does, and `loss/clip_mean`: how far from 1 ratios may be, mean over tokens."""
        said = super().__call__(logprobs, batch, totals)
        away = aggregate(self._away(logprobs, batch), batch, totals, "token")
        return replace(said, metrics={**said.metrics, "loss/clip_mean": away})

    def terms(self, logprobs: Float[Tensor, "N"], batch: Batch) -> Terms:
        ratio, away = bounded_ratio(log_policy_ratio(logprobs, batch)), self._away(logprobs, batch)
        return self.pessimistic(ratio, batch, ratio.clamp(1 - away, 1 + away))

    def _away(self, logprobs: Float[Tensor, "N"], batch: Batch) -> Float[Tensor, "N"]:
        mask = batch.response_mask
        tail = mask & (batch.left(mask) <= self.tail)
        old = masked_float(logprobs if batch.old_logprobs is None else batch.old_logprobs, mask).detach()
        certain = batch.sums(old.exp() * tail) / batch.sums(tail).clamp(min=1)
        away = self.clip_low + (self.clip_high - self.clip_low) * torch.sigmoid(self.slope * (1 - certain))
        return batch.per_token(away)
