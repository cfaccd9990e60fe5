"""ECHO (arXiv 2602.02150): uncertain tokens count more (`credit=echo`), and replies whose ends are certain move less
(`loss=echo`).

    credit   1 + amount S_t,  S_t = clip(entropy z(H_t) + doubt z(1 - C_t), -bound, bound)
    loss     PPO's clip with eps_i = least + (most - least) sigmoid(slope (1 - mean of the last C_t of reply i))

H_t is the entropy that token t was drawn from, C_t its own probability, both of the policy before the step, and z the
distance from the mean, over all response tokens of the step, in deviations. Constants and formulas are the official
release's: the sigmoid is at least 1/2, so that eps_i is never below the middle between least and most. Of the paper are
left out the tree of branching rollouts, which its script for AIME has switched off, and training on the most frequent
answer as the right one.

Measured: scripts/reproduce/frontier_c.md (the loss, with labels by majority: null).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_cli.history import History
from grpo_cli.rules.loss import Clipped, Terms, aggregate, bounded_ratio, log_policy_ratio, masked_float
from grpo_cli.support.facts import facts
from grpo_cli.support.ranges import Count, Range
from grpo_cli.types import Batch, LossOutput, Readout, Totals


@facts(reads=("entropies",))
def echo(
    batch: Batch,
    problems: Sequence[str],
    history: History,
    readout: Readout,
    *,
    amount: Annotated[float, Range(0, because="0 is no credit")],
    entropy: Annotated[float, Range(0)],
    doubt: Annotated[float, Range(0)],
    bound: Annotated[float, Range(0, because="it bounds how many deviations count", above=True)],
) -> Float[Tensor, "B T"]:
    """Tokens count more by how uncertain the policy was, and by how unlikely the token is."""
    assert readout.entropies is not None, "it is read"
    mask = batch.response_mask
    doubts = 1 - readout.logprobs.exp()
    score = entropy * _standard(readout.entropies, mask) + doubt * _standard(doubts, mask)
    return 1 + amount * score.clamp(-bound, bound)


def _standard(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """In deviations from the mean of the tokens in `mask`; 0 outside, and where all are alike."""
    of = values[mask].double()
    if not len(of) or bool((of == of[0]).all()):
        return torch.zeros_like(values)
    standard = (values.double() - of.mean()) / of.std(correction=0)
    return standard.masked_fill(~mask, 0.0).to(values.dtype)


@dataclass(frozen=True)
class Echo(Clipped):
    """GRPO, but that a reply's ratios may be away from 1 by the middle of `clip_low` and `clip_high` up to nearly
    `clip_high`: the less, the more certain the old policy was of its last `tail` tokens (ECHO, arXiv 2602.02150)."""

    slope: Annotated[float, Range(0, because="0 is the same clip for all replies")]
    tail: Count

    def __call__(self, logprobs: Float[Tensor, "B T"], batch: Batch, totals: Totals) -> LossOutput:
        """As `Clipped`; `loss/clip_mean` is the mean distance from 1 that ratios may have, over tokens."""
        said = super().__call__(logprobs, batch, totals)
        away = self._away(logprobs, batch).expand_as(logprobs)
        return replace(
            said, metrics={**said.metrics, "loss/clip_mean": aggregate(away, batch.loss_mask, totals, "token")}
        )

    def terms(self, logprobs: Float[Tensor, "B T"], batch: Batch) -> Terms:
        ratio, away = bounded_ratio(log_policy_ratio(logprobs, batch)), self._away(logprobs, batch)
        advantage = batch.advantages.float()[:, None]
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
