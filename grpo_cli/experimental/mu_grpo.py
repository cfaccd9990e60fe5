"""mu-GRPO: few large stages of rollouts and then updates, a wide clip, and no push down on what follows a token that
has moved too far (arXiv 2605.17570).

    A >= 0: -min(rho A, clip(rho) A), per token
    A < 0:  the same up to and with the first token whose rho is outside [1 / veto, veto], and 0 for those after it

A stage is a step: train.prompts=256 train.minibatches=64. Only the paper's abstract and summaries could be read, no
formulas and no numbers. In them the veto has a threshold of its own, and removes what follows the first ratio beyond
it in a completion with A < 0. Ours: a band with two sides, its width, the width of the clip, and that a vetoed token
counts in the divisors.

Not measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_cli.rules.loss import Clipped, Terms, bounded_ratio, log_policy_ratio
from grpo_cli.types import Batch


@dataclass(frozen=True)
class MuGrpo(Clipped):
    """GRPO, but that in a completion with A < 0 the tokens after the first one whose ratio is outside [1 / veto, veto]
    add nothing to the policy loss (mu-GRPO, arXiv 2605.17570). They count in its divisors, and as clipped."""

    veto: Annotated[float | int, Field(gt=1)]

    def terms(self, logprobs: Float[Tensor, "N"], batch: Batch) -> Terms:
        log_ratio = log_policy_ratio(logprobs, batch)
        said = self.pessimistic(bounded_ratio(log_ratio), batch)
        beyond = (log_ratio.detach().abs() > math.log(self.veto)).int()
        vetoed = (batch.running(beyond) > beyond) & (batch.advantages < 0)
        return Terms(said.terms.masked_fill(vetoed, 0.0), said.ratio, said.clipped | vetoed)
