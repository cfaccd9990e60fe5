"""Dr. GRPO: rewards minus their mean, undivided (arXiv 2503.20783).

    A = r - mean(r)

Not measured on its own; it is the advantage of two arms of a study (docs/studies.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from grpo_cli.rules.advantage import StatsOver, centred, compared
from grpo_cli.types import ScoredGroup


def dr_grpo(group: ScoredGroup, kept: Sequence[int], *, stats_over: StatsOver) -> Float[Tensor, " K"]:
    """Return rewards less their mean: no bias towards prompts whose rewards hardly differ. The other half of Dr. GRPO,
    no division by the length, is the loss's `aggregation: constant`."""
    return centred(*compared(group, kept, stats_over))
