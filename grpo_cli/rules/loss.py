"""Log-probabilities and advantages to a scalar and its metrics: GRPO and the losses that differ from it by one idea.

Each variant says what a token contributes; masking, mismatch weights, KL, averaging and metrics are shared. The clip
acts on `policy_ratio` (learner / old policy) only: the mismatch weight in `batch.weights` multiplies the clipped term
from outside, without gradient, and does not touch the KL term. Divisors come from `Totals`, so a micro-batch yields its
share of the loss and of each metric, and shares add up. All is computed in float32, whatever the model's precision.

`aggregation` is how tokens are averaged:
  sequence   mean over the tokens of a sequence, then over sequences (GRPO as published; TRL's `grpo`);
  token      mean over all tokens (DAPO): long completions count more;
  constant   sum over sequences * max_new_tokens (Dr. GRPO, arXiv 2503.20783): no division by the length at all.
A sequence without a token left to train on adds nothing; the divisors of `sequence` and `constant` still count it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_cli.support.errors import refuse
from grpo_cli.types import Batch, LossOutput, Totals

AGGREGATIONS = ("sequence", "token", "constant")

# Beyond exp(20) a ratio means nothing, and one that overflows would turn a zero advantage into NaN.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Terms:
    """What each token contributes, its policy ratio, and whether the clip acts on it."""

    terms: Float[Tensor, "B T"]
    ratio: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]


@dataclass(frozen=True)
class Clipped(ABC):
    """A loss by its settings: `terms` says what each token contributes, the rest is the same for all.

    clip_low     how far the ratio may fall below 1 before the clip acts, at most 1.
    clip_high    how far it may rise above 1.
    kl_coef      weight of the k3 KL to the model as it was at the start; 0 needs no such model.
    aggregation  how tokens are averaged, see the module.
    """

    clip_low: float
    clip_high: float
    kl_coef: float
    aggregation: str

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.clip_low <= 1:
            problems.append(f"loss.clip_low={self.clip_low} must be from 0 to 1, which is no lower bound")
        if not self.clip_high >= 0:
            problems.append(f"loss.clip_high={self.clip_high} must be at least 0")
        if not self.kl_coef >= 0:
            problems.append(f"loss.kl_coef={self.kl_coef} must be at least 0, which is no KL term")
        if self.aggregation not in AGGREGATIONS:
            problems.append(f"loss.aggregation={self.aggregation} is unknown: use {', '.join(AGGREGATIONS)}")
        refuse(problems)

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def __call__(self, logprobs: Float[Tensor, "B T"], batch: Batch, totals: Totals) -> LossOutput:
        """Weights, KL, averages and metrics: what every variant does with its per-token terms.

        Metrics are detached tensors, so nothing waits for the device. The clip fraction and the ratio are means over
        tokens whatever the aggregation; `loss/kl` is the KL itself, not multiplied by `kl_coef`, and there only with a
        reference.
        """
        mask = batch.loss_mask
        said = self.terms(logprobs, batch)
        loss = policy = aggregate(said.terms * batch.weights.detach().float(), mask, totals, self.aggregation)
        metrics = {
            "loss/policy": policy.detach(),
            "loss/clip_fraction": aggregate(said.clipped.float(), mask, totals, "token"),
            "loss/policy_ratio_mean": aggregate(said.ratio.detach(), mask, totals, "token"),
        }
        assert batch.ref_logprobs is not None or not self.needs_reference, (
            "a KL term without reference log-probabilities"
        )
        if batch.ref_logprobs is not None:
            kl = aggregate(_k3(logprobs, batch.ref_logprobs, mask), mask, totals, self.aggregation)
            metrics["loss/kl"] = kl.detach()
            if self.kl_coef:
                loss = policy + self.kl_coef * kl
        return LossOutput(loss, metrics)

    @abstractmethod
    def terms(self, logprobs: Float[Tensor, "B T"], batch: Batch) -> Terms:
        """What a variant says of each token; read only where `batch.loss_mask` is true."""

    def _pessimistic(self, ratio: Float[Tensor, "B T"], advantages: Float[Tensor, " B"]) -> Terms:
        """PPO's terms, and where the clip takes the gradient away."""
        advantage = advantages.float()[:, None]
        terms = -torch.minimum(ratio * advantage, self._bounded(ratio) * advantage)
        above, below = ratio > 1 + self.clip_high, ratio < 1 - self.clip_low
        return Terms(terms, ratio, (above & (advantage > 0)) | (below & (advantage < 0)))

    def _bounded(self, ratio: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        return ratio.clamp(1 - self.clip_low, 1 + self.clip_high)


class Grpo(Clipped):
    """Per token -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (GRPO, arXiv 2402.03300, with PPO's clip).

    Published settings: clip_low 0.2, clip_high 0.2, kl_coef 0.04, aggregation sequence. With one update per generation
    rho is 1 with a gradient, and the clip never acts.
    """

    def terms(self, logprobs: Float[Tensor, "B T"], batch: Batch) -> Terms:
        return self._pessimistic(_ratio(_log_policy_ratio(logprobs, batch)), batch.advantages)


class Gspo(Clipped):
    """GRPO with one ratio per sequence, the geometric mean over its trained tokens (GSPO, arXiv 2507.18071).

    Each token carries the sequence's ratio in value and its own log-probability in gradient (the paper's GSPO-token
    form), so that per-token weights still act per token; unweighted, its gradient is that of the sequence form. The
    clip is all-or-nothing for a sequence. Published settings: clip_low 3e-4, clip_high 4e-4, kl_coef 0, aggregation
    sequence: sequence ratios stay much nearer to 1 than token ratios.
    """

    def terms(self, logprobs: Float[Tensor, "B T"], batch: Batch) -> Terms:
        log_ratio = _log_policy_ratio(logprobs, batch)
        num_tokens = batch.loss_mask.sum(dim=1, keepdim=True).clamp(min=1)
        sequence_log_ratio = log_ratio.detach().sum(dim=1, keepdim=True) / num_tokens
        ratio = _ratio(sequence_log_ratio + (log_ratio - log_ratio.detach()))
        return self._pessimistic(ratio, batch.advantages)


class Cispo(Clipped):
    """Per token -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi (CISPO, MiniMax-M1, arXiv 2506.13585).

    A clipped token keeps a gradient, of bounded weight, where the other losses drop it. Published settings: no lower
    bound (clip_low 1.0), kl_coef 0, aggregation token; the upper bound is not in the paper, ScaleRL (arXiv 2510.13786)
    uses rho <= 5, that is clip_high 4.0. Its value is no measure of progress: it contains log pi itself.
    """

    def terms(self, logprobs: Float[Tensor, "B T"], batch: Batch) -> Terms:
        ratio = _ratio(_log_policy_ratio(logprobs, batch)).detach()
        weight = self._bounded(ratio)
        terms = -weight * batch.advantages.float()[:, None] * _masked(logprobs, batch.loss_mask)
        return Terms(terms, ratio, weight != ratio)


def aggregate(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], totals: Totals, aggregation: str
) -> Float[Tensor, ""]:
    """This batch's share of the mean of `values` over the tokens in `mask` (see the module for the three means)."""
    masked = values.masked_fill(~mask, 0.0)
    if aggregation == "sequence":
        means = masked.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return means.sum() / max(totals.sequences, 1)
    if aggregation == "token":
        return masked.sum() / max(totals.tokens, 1)
    return masked.sum() / max(totals.sequences * totals.max_new_tokens, 1)


def _log_policy_ratio(logprobs: Float[Tensor, "B T"], batch: Batch) -> Float[Tensor, "B T"]:
    """log(learner / old policy), 0 outside the loss mask; the learner itself is the old policy until it has moved."""
    learner = _masked(logprobs, batch.loss_mask)
    if batch.policy_logprobs is None:
        return learner - learner.detach()
    return learner - _masked(batch.policy_logprobs, batch.loss_mask).detach()


def _k3(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Schulman's k3 estimator of KL(learner || reference): exp(d) - d - 1 >= 0 with d = log(reference / learner)."""
    difference = _masked(ref_logprobs, mask).detach() - _masked(logprobs, mask)
    return _ratio(difference) - difference - 1


def _ratio(log_ratio: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _masked(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """In float32, 0 outside the mask before anything is computed: what padding holds (-inf, NaN) cannot leak."""
    return values.float().masked_fill(~mask, 0.0)
