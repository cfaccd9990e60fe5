"""Functions of a decode step through torch.compile, where available: a few kernels in place of about ten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_cli.model.compiling import Compiler

# Compiled functions have fixed shapes, and compiling one takes a minute: so rows come in few numbers.
LEAST_ROWS = 16


def bucket(rows: int) -> int:
    """The number of rows, rounded up.

    >>> bucket(1), bucket(16), bucket(17)
    (16, 16, 32)
    """
    return max(LEAST_ROWS, 1 << (rows - 1).bit_length())


def _normed(norm: Callable[..., Any], hidden: Any) -> Any:
    return norm(hidden)


@dataclass(frozen=True)
class Functions:
    """A layer before and after its attention, and the model's last norm. What `after` returns is for `before` and
    `last`."""

    before: Callable[..., Any]
    after: Callable[..., Any]
    last: Callable[..., Any] = _normed
    compiled: bool = False

    def rows(self, count: int) -> int:
        """How many rows to lay out for `count`."""
        return bucket(count) if self.compiled else count


class Compiled:
    """`functions` compiled; if compiling one fails, all run uncompiled, with one warning."""

    def __init__(self, functions: Functions, warn: Callable[[str], None]) -> None:
        compiler = Compiler("decode steps", "engine.compile", warn)
        made = {name: compiler.compiled(getattr(functions, name), False) for name in ("before", "after")}
        self.functions = Functions(**made, compiled=True)
