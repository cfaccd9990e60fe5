"""Functions of a decode step through torch.compile: a few kernels in place of some ten, where that can be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_cli.model.compiling import Compiler

# Compiled functions are of fixed shape, and a new one is compiled for a minute: so rows come in few numbers.
LEAST_ROWS = 16


def bucket(rows: int) -> int:
    """The number that so many rows are rounded up to.

    >>> bucket(1), bucket(16), bucket(17)
    (16, 16, 32)
    """
    return max(LEAST_ROWS, 1 << (rows - 1).bit_length())


@dataclass(frozen=True)
class Functions:
    """What a layer does before and after its attention, and how answers of several pages are joined (`flash.join`)."""

    before: Callable[..., Any]
    after: Callable[..., Any]
    join: Callable[..., Any]
    compiled: bool = False

    def rows(self, count: int) -> int:
        """How many rows are laid out for so many."""
        return bucket(count) if self.compiled else count


class Compiled:
    """`functions` compiled, until one of them cannot be: then all run uncompiled, which is logged once."""

    def __init__(self, functions: Functions, warn: Callable[[str], None]) -> None:
        compiler = Compiler("decode steps", "engine.compile", warn)
        # Pages are asked in any number.
        shapes = {"before": False, "after": False, "join": True}
        made = {name: compiler.compiled(getattr(functions, name), dynamic) for name, dynamic in shapes.items()}
        self.functions = Functions(**made, compiled=True)
