"""GSPO: one policy ratio per completion, the geometric mean over its tokens (arXiv 2507.18071).

    rho = exp(mean over the tokens of log(pi / pi_old)), one per completion, clipped as in PPO

Not measured on its own.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from grpo_cli.rules.loss import Clipped, Terms, bounded_ratio, log_policy_ratio
from grpo_cli.types import Batch


class Gspo(Clipped):
    """Each token carries the sequence's ratio in value and its own log-probability in gradient (the paper's GSPO-token
    form), so that per-token weights still act per token; unweighted, its gradient is that of the sequence form. The
    clip is all-or-nothing for a sequence. Published settings: clip_low 3e-4, clip_high 4e-4, kl_coef 0, aggregation
    sequence: sequence ratios stay much nearer to 1 than token ratios."""

    def terms(self, logprobs: Float[Tensor, "N"], batch: Batch) -> Terms:
        log_ratio = log_policy_ratio(logprobs, batch)
        of_rows = batch.sums(log_ratio.detach()) / batch.sums(batch.loss_mask).clamp(min=1)
        ratio = bounded_ratio(batch.per_token(of_rows) + (log_ratio - log_ratio.detach()))
        return self.pessimistic(ratio, batch)
