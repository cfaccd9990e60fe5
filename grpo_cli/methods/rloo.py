"""RLOO: REINFORCE with the mean of the other rollouts as baseline (arXiv 2402.14740).

    A_i = r_i - mean of r_j over all j other than i = N / (N - 1) * (r_i - mean(r))

Not measured on its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from grpo_cli.rules.advantage import StatsOver, centred, compared
from grpo_cli.types import ScoredGroup


def rloo(group: ScoredGroup, kept: Sequence[int], *, stats_over: StatsOver) -> Float[Tensor, " K"]:
    """Subtract a baseline that is independent of the sample. Over `group` the others are the G - 1 of the whole
    group."""
    rewards, reference = compared(group, kept, stats_over)
    return centred(rewards, reference) * (len(reference) / max(1, len(reference) - 1))
