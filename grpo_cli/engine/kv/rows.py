"""The rows of one decode step: which keys each reads and where it writes; and what observes their attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.engine.kv.tiles import PageTable, Pieces


@dataclass(frozen=True)
class Rows:
    """What the rows of a decode step read, and where they write."""

    tokens: Int[Tensor, "R"]
    positions: Int[Tensor, "R"]
    lengths: Int[Tensor, "R"]  # keys of their own before this step
    write_to: Int[Tensor, "R"]  # the page of its own that each row writes its key to
    width: int  # keys to read of a row's page: all, or if each row has only one, enough for the longest
    own: Pieces | PageTable
    prompt: Pieces | PageTable


@runtime_checkable
class Watch(Protocol):
    """Sees the queries and attention weights of every layer of a step."""

    def prepare(self, rows: Rows) -> None:
        """A step begins."""

    def see(self, layer: int, queries: Float[Tensor, "R HG D"], weights: Float[Tensor, "RH G n"] | None) -> None:
        """`weights` are over the prompts' keys (none if no row sees any) and then the rows' own; None if the step does
        not expose them (`paged.py`)."""
