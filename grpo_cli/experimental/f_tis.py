"""F-TIS: truncated importance sampling that leaves out rollouts far from the policy and no better than the others
(arXiv 2605.22537).

    weight = 0 if A <= 0 and sum over tokens of (xi log xi - xi + 1) >= gate, else min(xi, is_threshold)

Not measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_cli.rules.correction import (
    MAX_LOG_RATIO,
    Prox,
    Window,
    bounded_exp,
    log_sparsity_ratio,
    masked_mean,
    mismatch_metrics,
)
from grpo_cli.types import Batch, Verdict

Positive = Annotated[float | int | None, Field(gt=0)]


@dataclass(frozen=True)
class Gated:
    """A correction that leaves out rollouts by their estimated KL(policy || sampler); `gate` null: none. What it leaves
    out counts in the divisors and in its group's statistics. The estimator is ours: the paper's was not available. This
    one is unbiased for tokens of the sampler, and never negative."""

    is_threshold: Positive
    gate: Positive
    prox: Prox
    prox_window: Window

    needs_policy_logprobs = True
    rejects = False
    count_rejected = True

    def __call__(self, batch: Batch, policy_logprobs: Float[Tensor, "N"]) -> Verdict:
        """Correct as `Correct` does, with `mismatch/gated`: the share of rows with sampled tokens that are left out."""
        log_ratio, mask = log_sparsity_ratio(batch, policy_logprobs), batch.drawn_mask
        bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # The estimate of KL(policy || sampler) from tokens of the sampler: the sum of xi log xi - xi + 1.
        distance = batch.sums(bounded.exp() * bounded - bounded.expm1())
        most = math.inf if self.gate is None else self.gate
        # A NaN is not left out: the trainer's guard against bad steps is to see it.
        gated = (batch.sums(batch.advantages) <= 0) & (distance >= most)
        weights = bounded_exp(log_ratio).clamp(max=math.inf if self.is_threshold is None else self.is_threshold)
        weights = weights.masked_fill(~mask | batch.spread(gated), 0.0)
        answered = batch.any(mask)
        metrics = {**mismatch_metrics(batch, log_ratio, weights, mask)}
        metrics["mismatch/gated"] = float(masked_mean(gated.float(), answered))
        reasons = self._reasons(answered.tolist(), gated.tolist(), distance.tolist())
        return Verdict(weights, mask, reasons, metrics)

    def _reasons(self, answered: list[bool], gated: list[bool], distance: list[float]) -> tuple[str, ...]:
        empty = "empty: no response token"
        return tuple(
            empty if not some else f"gate: a KL of {kl:.3g} >= {self.gate}, and no advantage" if out else ""
            for some, out, kl in zip(answered, gated, distance, strict=True)
        )
