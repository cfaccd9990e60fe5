"""Log-probabilities and advantages to a scalar and its metrics: GRPO and the losses that differ from it by one idea.

Each variant says what a token contributes; masking, mismatch weights, KL, averaging and metrics are shared. The clip
acts on `policy_ratio` (learner / old policy) only: the mismatch weight in `batch.weights` multiplies the clipped term
from outside, without gradient, and does not touch the KL term. Divisors come from `Totals`, so a micro-batch yields its
share of the loss and of each metric, and shares add up. All is computed in float32, whatever the model's precision.

`aggregation` is how tokens are averaged:
  sequence   mean over the tokens of a sequence, then over sequences (GRPO as published; TRL's `grpo`);
  token      mean over all tokens (DAPO): long completions count more;
  constant   sum / (sequences x max_new_tokens) (Dr. GRPO, arXiv 2503.20783): no division by the length at all.
A sequence without a token left to train on adds nothing; the divisors of `sequence` and `constant` still count it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from grpo_cli.support.ranges import OneOf
from grpo_cli.types import Batch, LossOutput, Totals

AGGREGATIONS = ("sequence", "token", "constant")

# As in verl and slime: beyond exp(20) = 5e8 a ratio means nothing, and one that overflows would turn a zero advantage
# into NaN.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Terms:
    """The contribution of each token, its policy ratio, and whether the clip acts on it."""

    terms: Float[Tensor, "N"]
    ratio: Float[Tensor, "N"]
    clipped: Bool[Tensor, "N"]


@dataclass(frozen=True)
class Clipped(ABC):
    """A loss by its settings: `terms` has each token's share, the rest is the same for all."""

    clip_low: Annotated[float, Field(ge=0, le=1)]
    clip_high: Annotated[float, Field(ge=0)]
    kl_coef: Annotated[float, Field(ge=0)]
    aggregation: Annotated[str, OneOf(AGGREGATIONS)]

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_advantage(self) -> bool:
        """True if a rollout whose advantages are all 0 adds nothing to the gradient."""
        return not self.kl_coef

    def __call__(self, logprobs: Float[Tensor, "N"], batch: Batch, totals: Totals) -> LossOutput:
        """Compute weights, KL, averages and metrics: what every variant does with its per-token terms.

        Metrics are detached tensors, so nothing waits for the device. The clip fraction and the ratio are means over
        tokens whatever the aggregation; `loss/kl` is the KL itself, not multiplied by `kl_coef`, and there only with a
        reference.
        """
        tokens = self.terms(logprobs, batch)
        weighed = tokens.terms * batch.weights.detach().float()
        loss = policy = aggregate(weighed, batch, totals, self.aggregation)
        metrics = {
            "loss/policy": policy.detach(),
            "loss/clip_fraction": aggregate((tokens.clipped & (batch.weights != 0)).float(), batch, totals, "token"),
            "loss/policy_ratio_mean": aggregate(tokens.ratio.detach(), batch, totals, "token"),
        }
        if self.needs_reference:
            assert batch.ref_logprobs is not None, "a KL term without reference log-probabilities"
            kl = aggregate(k3(logprobs, batch.ref_logprobs, batch.loss_mask), batch, totals, self.aggregation)
            metrics["loss/kl"] = kl.detach()
            loss = policy + self.kl_coef * kl
        return LossOutput(loss, metrics)

    @abstractmethod
    def terms(self, logprobs: Float[Tensor, "N"], batch: Batch) -> Terms:
        """Compute each token's terms, which are read only where `batch.loss_mask` is true."""

    def pessimistic(self, ratio: Float[Tensor, "N"], batch: Batch, bounded: Float[Tensor, "N"] | None = None) -> Terms:
        """Compute PPO's terms, and where the clip, by default `self.bounded`, takes the gradient away."""
        bounded, advantage = self.bounded(ratio) if bounded is None else bounded, batch.advantages.float()
        terms = -torch.minimum(ratio * advantage, bounded * advantage)
        return Terms(terms, ratio, ((ratio > bounded) & (advantage > 0)) | ((ratio < bounded) & (advantage < 0)))

    def bounded(self, ratio: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
        return ratio.clamp(1 - self.clip_low, 1 + self.clip_high)


class Grpo(Clipped):
    """Per token -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (GRPO, arXiv 2402.03300, with PPO's clip).

    Published settings: clip_low 0.2, clip_high 0.2, kl_coef 0.04, aggregation sequence. With one update per generation
    and prox=step_start rho is 1 with a gradient, and the clip never acts.
    """

    def terms(self, logprobs: Float[Tensor, "N"], batch: Batch) -> Terms:
        return self.pessimistic(bounded_ratio(log_policy_ratio(logprobs, batch)), batch)


def aggregate(values: Float[Tensor, "N"], batch: Batch, totals: Totals, aggregation: str) -> Float[Tensor, ""]:
    """Return this batch's share of the mean of `values` over the tokens in the loss (see the module for the means)."""
    masked = values.masked_fill(~batch.loss_mask, 0.0)
    if aggregation == "sequence":
        means = batch.sums(masked) / batch.sums(batch.loss_mask).clamp(min=1)
        return means.sum() / max(totals.sequences, 1)
    if aggregation == "token":
        return masked.sum() / max(totals.tokens, 1)
    return masked.sum() / max(totals.sequences * totals.max_new_tokens, 1)


def log_policy_ratio(logprobs: Float[Tensor, "N"], batch: Batch) -> Float[Tensor, "N"]:
    """Compute log(learner / old policy), 0 outside the loss mask. Until it has moved the learner is the old policy."""
    learner = masked_float(logprobs, batch.loss_mask)
    if batch.old_logprobs is None:
        return learner - learner.detach()
    return learner - masked_float(batch.old_logprobs, batch.loss_mask).detach()


def k3(logprobs: Float[Tensor, "N"], ref_logprobs: Float[Tensor, "N"], mask: Bool[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Estimate KL(learner || reference) by Schulman's k3: exp(d) - d - 1 >= 0 with d = log(reference / learner)."""
    return k3_of(masked_float(ref_logprobs, mask).detach() - masked_float(logprobs, mask))


def k3_of(difference: Tensor) -> Tensor:
    """Compute exp(d) - d - 1, which by exp alone is rounding near 0; above the bound it has no gradient."""
    return difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).expm1() - difference.clamp(max=_MAX_LOG_RATIO)


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def masked_float(values: Float[Tensor, "N"], mask: Bool[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Return values in float32, 0 outside the mask before anything is computed: -inf or NaN there cannot leak."""
    return values.float().masked_fill(~mask, 0.0)
