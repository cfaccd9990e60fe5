"""CISPO: the clip bounds the weight of a token and never drops it (MiniMax-M1, arXiv 2506.13585).

    -sg(clip(rho, 1 - clip_low, 1 + clip_high)) * A * log pi, per token

Not measured on its own.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from grpo_cli.rules.loss import Clipped, Terms, bounded_ratio, log_policy_ratio, masked_float
from grpo_cli.types import Batch


class Cispo(Clipped):
    """A clipped token keeps a gradient, of bounded weight, where the other losses drop it. Published settings: no lower
    bound (clip_low 1.0), kl_coef 0, aggregation token; the upper bound is not in the paper, ScaleRL (arXiv 2510.13786)
    uses rho <= 5, that is clip_high 4.0. Its value is no measure of progress: it contains log pi itself."""

    def terms(self, logprobs: Float[Tensor, "N"], batch: Batch) -> Terms:
        ratio = bounded_ratio(log_policy_ratio(logprobs, batch)).detach()
        weight = self.bounded(ratio)
        terms = -weight * batch.advantages.float() * masked_float(logprobs, batch.loss_mask)
        return Terms(terms, ratio, weight != ratio)
