"""Dr. GRPO: rewards minus their mean, undivided (arXiv 2503.20783).

    A = r - mean(r)

Not measured on its own; it is the advantage of two arms of scripts/reproduce/frontier_a.md.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.rules.advantage import StatsOver, centred, compared_rewards, varies
from grpo_cli.support.facts import facts


@facts(divides=False)
def dr_grpo(
    kept_rewards: Float[Tensor, " K"], group_rewards: Float[Tensor, " G"], *, stats_over: StatsOver
) -> Float[Tensor, " K"]:
    """No bias towards prompts whose rewards hardly differ. The other half of Dr. GRPO, no division by the length, is
    the loss's `aggregation: constant`."""
    reference = compared_rewards(kept_rewards, group_rewards, stats_over)
    if not varies(reference):
        return torch.zeros_like(kept_rewards)
    return centred(kept_rewards, reference).to(kept_rewards.dtype)
