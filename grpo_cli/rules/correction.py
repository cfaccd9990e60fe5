"""Sampler/policy mismatch. Importance weights and rejected tokens by xi = dense old policy / sampler, always measured.

xi, the sparsity ratio, is 1 when the sampler drew from the dense policy. Evicted KV entries (Sparse-RL, arXiv
2601.10079), a foreign engine, or weights of earlier updates make it differ. Two orthogonal parts answer: reweighting
(`importance` sampling) multiplies a token's loss, `rejection` (and the mask band) takes tokens out of the loss and out
of its divisors. This module never looks at the learner's own ratio, which the loss clips. Presets, with their sources,
are the YAML files of `conf/correction`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from grpo_cli.rules.loss import bounded_ratio, k3_of
from grpo_cli.support.errors import UserError, refuse
from grpo_cli.support.ranges import OneOf
from grpo_cli.types import Batch, Verdict

Bound = Annotated[float | int | None, Field(ge=0)]
Prox = Annotated[str, OneOf(("step_start", "sampler", "ewma"))]
Window = Annotated[float | int, Field(ge=0)]


@dataclass(frozen=True)
class Correct:
    """A correction by its settings (an `interfaces.Correction`).

    A weight that is masked to 0 still counts in the loss's divisor, a token outside the band does not. The mean of
    normalised weights is over all rollouts of the batch (token: their sampled tokens), rejected ones included.
    """

    importance: Annotated[str, OneOf(("none", "token", "sequence"))]
    # `is_` stands for importance sampling: bounds of a weight, and what becomes of one beyond them
    is_threshold: Bound
    is_threshold_low: Bound
    is_mode: Annotated[str, OneOf(("truncate", "mask"))]
    batch_normalise: bool
    rejection: Annotated[str, OneOf(("none", "veto"))]
    veto: Annotated[float | int, Field(gt=0, lt=1)]
    mask_low: Bound
    mask_high: Bound
    count_rejected: bool
    prox: Prox
    prox_window: Window

    def __post_init__(self) -> None:
        text = "correction.{}={} must not be greater than correction.{}={}"
        bounds = ("is_threshold_low", "is_threshold"), ("mask_low", "mask_high")
        found = [(low, getattr(self, low), high, getattr(self, high)) for low, high in bounds]
        refuse([text.format(*one) for one in found if None not in one and one[1] > one[3]])

    @property
    def needs_old_logprobs(self) -> bool:
        """True if weights or mask depend on xi; if not, measuring it can wait for the learner's own forward pass."""
        return self.importance != "none" or self.rejection != "none" or self._has_band

    @property
    def rejects(self) -> bool:
        """True if a whole sequence can be taken out: by the veto, the band, or a weight that is masked to 0."""
        return self.rejection != "none" or self._has_band or (self.importance != "none" and self.is_mode == "mask")

    @property
    def _has_band(self) -> bool:
        return self.mask_low is not None or self.mask_high is not None

    def __call__(self, batch: Batch, old_logprobs: Float[Tensor, "N"]) -> Verdict:
        """Judge all rows at once: batch normalisation and quantiles are over all of them.

        A row adds to the policy loss if and only if one of its weights is not 0.
        """
        log_ratio, mask = log_mismatch_ratio(batch, old_logprobs), batch.sampled_mask
        veto = -math.inf if self.rejection == "none" else math.log(self.veto)
        vetoed = batch.any(log_ratio < veto)  # by xi that is not clamped
        kept = mask & ~batch.per_token(vetoed) & self._in_band(log_ratio)
        weights = self._weights(batch, log_ratio).masked_fill(~kept, 0.0)
        lowest = torch.segment_reduce(log_ratio, "min", lengths=batch.lengths, unsafe=True, initial=0)
        flags = batch.any(mask), vetoed, batch.any(kept), batch.any(weights != 0)  # a NaN counts
        columns = (*flags, bounded_ratio(lowest), bounded_ratio(batch.sums(log_ratio)))
        reasons = tuple(self._reason(*row) for row in zip(*(column.tolist() for column in columns), strict=True))
        return Verdict(weights, kept, reasons, mismatch_metrics(batch, log_ratio, weights, kept))

    def _reason(self, answered: bool, vetoed: bool, left: bool, trained: bool, lowest: float, product: float) -> str:
        """Return in words, for `rollouts.jsonl`, why a row adds nothing to the policy loss; empty if it adds."""
        if trained:
            return ""
        if not answered:
            return "empty: no response token"
        if vetoed:
            return f"veto: a token with xi {lowest:.2g} < {self.veto:g}"
        if not left:
            return f"mask: no token with xi in [{self.mask_low}, {self.mask_high}]"
        return f"importance: no weight in [{self.is_threshold_low}, {self.is_threshold}] (product of xi {product:.2g})"

    def _in_band(self, log_ratio: Float[Tensor, "N"]) -> Bool[Tensor, "N"]:
        ratio = bounded_ratio(log_ratio)
        low = -math.inf if self.mask_low is None else self.mask_low
        high = math.inf if self.mask_high is None else self.mask_high
        return ~((ratio < low) | (ratio > high))  # a NaN stays in, where the trainer's guard against bad steps sees it

    def _weights(self, batch: Batch, log_ratio: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
        """Return the factor of each response token before any rejection."""
        if self.importance == "none":
            return torch.ones_like(log_ratio)
        if self.importance == "token":
            weights, counted = bounded_ratio(log_ratio), batch.sampled_mask
        else:
            weights, counted = bounded_ratio(batch.sums(log_ratio)), batch.any(batch.sampled_mask)
        low = -math.inf if self.is_threshold_low is None else self.is_threshold_low
        high = math.inf if self.is_threshold is None else self.is_threshold
        if self.is_mode == "truncate":
            weights = weights.clamp(low, high)
        else:
            weights = weights.masked_fill((weights < low) | (weights > high), 0.0)
        if self.batch_normalise:
            weights = weights / masked_mean(weights, counted).clamp(min=torch.finfo(weights.dtype).tiny)
        return weights if self.importance == "token" else batch.per_token(weights)


def log_mismatch_ratio(batch: Batch, old_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Return log xi = log(dense old policy / sampler) of each sampled token, float32, 0 elsewhere, without gradient.
    UserError for a sampled token whose probability is not known."""
    sampler, mask = batch.sampler_logprobs.detach().float(), batch.sampled_mask
    missing = int((~sampler.isfinite() & mask).sum())
    if missing:
        raise UserError(
            f"the engine returned no finite log-probability for {missing} of {int(mask.sum())} sampled tokens: use one "
            "that returns one for each token, such as engine=torch"
        )
    return (old_logprobs.detach().float() - sampler).masked_fill(~mask, 0.0)


def mismatch_metrics(
    batch: Batch, log_ratio: Float[Tensor, "N"], weights: Float[Tensor, "N"], kept: Bool[Tensor, "N"]
) -> Mapping[str, float]:
    """Measure how far sampler and policy are apart, over all sampled tokens, and what the correction did about it.

    `mismatch/kl` is the k3 estimate of KL(sampler || policy), mean of xi - 1 - log xi: never negative. The quantiles
    are the 0.1% and 1% ones of log xi. `rejected` is the share of answered sequences, and `masked_tokens` of sampled
    tokens, that add nothing to the policy loss, whatever took them out. `weight_mean` is over tokens left in the mask.
    With no response token at all there is no mismatch.
    """
    mask, trained = batch.sampled_mask, weights != 0
    token_log_ratios = log_ratio[mask]
    if not len(token_log_ratios):
        token_log_ratios = log_ratio.new_zeros(1)
    ratios = bounded_ratio(token_log_ratios)
    quantiles = np.quantile(token_log_ratios.numpy(), (0.001, 0.01), method="lower")  # torch takes 2**24 at most
    values = {
        "mismatch/ratio_mean": ratios.mean(),
        "mismatch/ratio_min": ratios.min(),
        "mismatch/log_ratio_q001": quantiles[0],
        "mismatch/log_ratio_q01": quantiles[1],
        "mismatch/kl": k3_of(token_log_ratios).mean(),
        "mismatch/rejected": masked_mean((~batch.any(trained)).float(), batch.any(mask)),
        "mismatch/masked_tokens": masked_mean((~trained).float(), mask),
        "mismatch/weight_mean": masked_mean(weights, kept),
    }
    return {name: float(value) for name, value in values.items()}


def masked_mean(values: Tensor, mask: Tensor) -> Float[Tensor, ""]:
    """Return the mean over the mask, 0 over none."""
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)
