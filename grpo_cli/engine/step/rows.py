"""The rows of one decode step, as tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Drawing:
    """The sampling settings of each row, and what no row needs. `natively`: draw in C where nothing is truncated."""

    temperature: Float[Tensor, "R"]
    top_p: Float[Tensor, "R"]
    top_k: Int[Tensor, "R"]
    tempered: bool
    greedy: bool
    all_greedy: bool
    truncated: bool
    natively: bool = False

    @property
    def flags(self) -> tuple[bool, ...]:
        return self.tempered, self.greedy, self.all_greedy, self.truncated

    def of(self, rows: slice) -> Drawing:
        """That of some rows."""
        some = {name: getattr(self, name)[rows] for name in ("temperature", "top_p", "top_k")}
        return replace(self, **some)


@dataclass(frozen=True)
class Rows:
    """What the rows of a decode step read, where they write, and how they draw. A table has any block where a row has
    none."""

    tokens: Int[Tensor, "R"]
    positions: Int[Tensor, "R"]
    held: Int[Tensor, "R"]  # keys of their own before this step
    write_to: Int[Tensor, "R"]  # the block of the new key
    seen: Int[Tensor, "R"]  # keys of their prompt
    slots: Int[Tensor, "R"]  # of an eviction policy's statistics
    uniform: Float[Tensor, "R"]
    own: Int[Tensor, "R K"]
    prompt: Int[Tensor, "R P"]
    drawing: Drawing
