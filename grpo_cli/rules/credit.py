"""How much each token of a step's batch counts: factors of the policy loss, before the batch is cut into parts."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from grpo_cli.history import History
from grpo_cli.types import Batch


def none(batch: Batch, problems: Sequence[str], history: History) -> Float[Tensor, "B T"] | None:
    """All tokens count alike."""
    return None
