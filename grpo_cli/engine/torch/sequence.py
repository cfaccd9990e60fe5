"""The engine's own record of one request: the one that changes in place, from waiting to running to a rollout."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_cli.types import Request


@dataclass(frozen=True)
class Parked:
    """What is left of a sequence that gave its slot back before its end, to go on later without a token's loss."""

    keys: Tensor  # [layers, heads, tokens, dim]
    values: Tensor
    made: int  # tokens
    last: int  # the latest of them
    sees_prompt: bool  # whether it still attends to its prompt in the pool
    notes: tuple[Tensor, ...]  # the keeper's

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass
class Sequence:
    """`index` is the place in the list of requests; `entry` the prompt's place in the pool while it is held, `slot` its
    own while it has one (-1: none)."""

    index: int
    request: Request
    entry: int = -1
    slot: int = -1
    parked: Parked | None = None
    predicted: float | None = None
    hidden: Tensor | None = None  # the policy's last hidden state after the predictor's prefix

    @property
    def held(self) -> int:
        """Keys of its own that it comes with."""
        return 0 if self.parked is None else self.parked.keys.shape[2]

    @property
    def made(self) -> int:
        """Tokens that it comes with."""
        return 0 if self.parked is None else self.parked.made
