"""Token weights of a step's batch: factors of the policy loss, applied before the batch is split."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from grpo_cli.history import History
from grpo_cli.types import Batch


def none(batch: Batch, problems: Sequence[str], history: History) -> Float[Tensor, "B T"] | None:
    """All tokens have the same weight."""
    return None
