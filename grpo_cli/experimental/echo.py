"""ECHO (arXiv 2602.02150): replies whose ends are certain move less (`loss=echo`).

    PPO's clip with eps_i = least + (most - least) sigmoid(slope (1 - mean of the last C_t of reply i))

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
    """GRPO, but that a reply's ratios may be `clip_low` (the least) to `clip_high` (the most) away from 1, either way:
    the less, the more certain the old policy was of its last `tail` tokens (ECHO, arXiv 2602.02150)."""

    slope: Annotated[float, Field(ge=0)]
    tail: Count

    def __call__(self, logprobs: Float[Tensor, "B T"], batch: Batch, totals: Totals) -> LossOutput:
        """Return what `Clipped` does, and `loss/clip_mean`: how far from 1 ratios may be, mean over tokens."""
        said = super().__call__(logprobs, batch, totals)
        away = self._away(logprobs, batch).expand_as(logprobs)
        return replace(
            said, metrics={**said.metrics, "loss/clip_mean": aggregate(away, batch.loss_mask, totals, "token")}
        )

    def terms(self, logprobs: Float[Tensor, "B T"], batch: Batch) -> Terms:
        ratio, away = bounded_ratio(log_policy_ratio(logprobs, batch)), self._away(logprobs, batch)
        advantage = batch.token_advantages.float()
        terms = -torch.minimum(ratio * advantage, ratio.clamp(1 - away, 1 + away) * advantage)
        above, below = ratio > 1 + away, ratio < 1 - away
        return Terms(terms, ratio, (above & (advantage > 0)) | (below & (advantage < 0)))

    def _away(self, logprobs: Float[Tensor, "B T"], batch: Batch) -> Float[Tensor, "B 1"]:
        mask = batch.response_mask
        left = mask.flip(1).cumsum(dim=1).flip(1)  # of the response, from this token on
        tail = mask & (left <= self.tail)
        old = masked_float(logprobs if batch.policy_logprobs is None else batch.policy_logprobs, mask).detach()
        certain = (old.exp() * tail).sum(dim=1, keepdim=True) / tail.sum(dim=1, keepdim=True).clamp(min=1)
        return self.clip_low + (self.clip_high - self.clip_low) * torch.sigmoid(self.slope * (1 - certain))
