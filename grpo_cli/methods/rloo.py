"""RLOO: REINFORCE with the mean of the other rollouts as baseline (arXiv 2402.14740).

    A_i = r_i - mean of r_j over all j other than i = N / (N - 1) * (r_i - mean(r))

Not measured on its own.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.rules.advantage import StatsOver, centred, compared_rewards, varies
from grpo_cli.support.facts import facts


@facts(divides=False)
def rloo(
    kept_rewards: Float[Tensor, " K"], group_rewards: Float[Tensor, " G"], *, stats_over: StatsOver
) -> Float[Tensor, " K"]:
    """The baseline is independent of the sample. Over `group` the others are the G - 1 of the whole group."""
    reference = compared_rewards(kept_rewards, group_rewards, stats_over)
    if not varies(reference):
        return torch.zeros_like(kept_rewards)
    count = len(reference)
    return (centred(kept_rewards, reference) * (count / (count - 1))).to(kept_rewards.dtype)
