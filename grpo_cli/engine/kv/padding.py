"""The sizes to which computation is padded so that bits do not depend on the batch. `invariance.py` finds them."""

from __future__ import annotations

from dataclasses import dataclass

# Batched products with fewer multiplications use a separate kernel in PyTorch (`bmm` on a CPU:
# aten/src/ATen/native/LinearAlgebra.cpp, `contraction_size * res_rows * res_cols < 400`).
SMALL_PRODUCT = 400
TILE = 16  # widths are multiples of this, so that few shapes occur


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class Padding:
    """How computation is padded: rows to at least `least` and a multiple of `rows`; the rows of one prompt, in the
    product that they share, to a multiple of `columns`; keys that are read to multiples of the two tiles."""

    rows: int = 1
    least: int = 1
    columns: int = 4
    prompt_tile: int = TILE
    slot_tile: int = TILE

    def padded_rows(self, count: int) -> int:
        """
        >>> Padding(rows=4, least=16).padded_rows(3), Padding(rows=4, least=16).padded_rows(17)
        (16, 20)
        """
        return round_up(max(count, self.least), self.rows)


def slot_tile(queries: int, dim: int) -> int:
    """The tile of slot widths if `queries` query heads of size `dim` share each key-value head.

    >>> slot_tile(queries=2, dim=32), slot_tile(queries=1, dim=8)
    (16, 64)
    """
    return round_up(-(-SMALL_PRODUCT // (queries * dim)), TILE)


def unpadded(group: int, dim: int) -> Padding:
    """Without a promise of bits: on a GPU, or below float32. Widths are still in tiles, so that few shapes occur."""
    return Padding(slot_tile=slot_tile(group, dim))
