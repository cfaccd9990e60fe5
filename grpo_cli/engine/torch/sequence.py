"""The engine's mutable record of one request, from waiting to running to a rollout."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_cli.types import Request


@dataclass(frozen=True)
class Parked:
    """A sequence that gave its slot back before its end, to continue later without losing a token."""

    keys: Tensor  # [layers, heads, tokens, dim]
    values: Tensor
    made: int  # tokens
    last: int  # the latest of them
    sees_prompt: bool  # whether it still reads its prompt in the pool
    notes: tuple[Tensor, ...]  # the keeper's

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass
class Sequence:
    """`index` is that of its request; `entry` its prompt's in the pool while it is held, `slot` its slot while it has
    one (-1: none)."""

    index: int
    request: Request
    entry: int = -1
    slot: int = -1
    parked: Parked | None = None
    predicted: float | None = None
    hidden: Tensor | None = None  # the policy's last hidden state after the predictor's prefix

    @property
    def held(self) -> int:
        """Keys of its own that it enters a slot with."""
        return 0 if self.parked is None else self.parked.keys.shape[2]

    @property
    def made(self) -> int:
        """Tokens that it enters a slot with."""
        return 0 if self.parked is None else self.parked.made
