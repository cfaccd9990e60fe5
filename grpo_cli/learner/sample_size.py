"""The effective number of rollouts in an update when another policy sampled them, and the step size it allows."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor

from grpo_cli.types import Batch


def effective_share(batch: Batch, logprobs: Float[Tensor, "N"]) -> float:
    """Return the effective sample size of a whole update as a share of its rollouts, from 1 / B to 1 (VCPO, arXiv
    2602.17616).

    (sum w)^2 / (B * sum w^2), with w the learner's over the sampler's probability of all the sampled tokens of a
    rollout, not truncated, since this measures the mismatch itself and not what a correction leaves of it. Only
    rollouts with a sampled token that counts are used; without any it is 1. NaN where a log-probability is NaN.
    """
    sampled = batch.sampled_mask
    rows = batch.any(sampled & (batch.weights != 0))
    if not rows.any():
        return 1.0
    log_ratio = logprobs.double() - batch.sampler_logprobs.double()
    of_rows = batch.sums(log_ratio.masked_fill(~sampled, 0.0))[rows]
    weights = (of_rows - of_rows.max()).exp()  # scaling the weights does not change the share
    share = float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))
    return min(share, 1.0)  # in this order a NaN stays one, for the learner's guard against bad steps


def rate_factor(ess: str, share: float, reference: float) -> float:
    """Return what `optim.ess` (sqrt, linear) multiplies the learning rate by: 1 for shares of at least `reference`."""
    part = min(1.0, share / reference)
    return math.sqrt(part) if ess == "sqrt" else part
