"""Functions of a decode step through torch.compile: a few kernels in place of some ten, where that can be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

BACKEND = "inductor"
# Compiled functions are of fixed shape, and a new one is compiled for a minute: so rows come in few numbers.
LEAST_ROWS = 16
# More than there are numbers of rows; PyTorch gives up at 8.
MOST_SHAPES = 32


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
    """`functions` compiled, until one of them cannot be: then all are as they were, which is said once."""

    def __init__(self, functions: Functions, warn: Callable[[str], None]) -> None:
        self._warn, self._failed = warn, False
        # Pages are asked in any number.
        shapes = {"before": False, "after": False, "join": True}
        made = {name: self._guarded(getattr(functions, name), dynamic) for name, dynamic in shapes.items()}
        self.functions = Functions(**made, compiled=True)

    def _guarded(self, function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        from torch._dynamo import config
        from torch._dynamo.exc import TorchDynamoException

        config.recompile_limit = max(config.recompile_limit, MOST_SHAPES)
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=BACKEND)

        def run(*operands: Any) -> Any:
            if not self._failed:
                try:
                    return compiled(*operands)
                except TorchDynamoException as error:
                    self._fall_back(error)
            return function(*operands)

        return run

    def _fall_back(self, error: Exception) -> None:
        self._failed = True
        cause = getattr(error, "inner_exception", error)
        reason = next(iter(str(cause).strip().splitlines()), "no reason given")
        self._warn(
            f"decode steps are not compiled, and so slower, since that failed ({type(cause).__name__}: {reason}). To "
            "begin without: engine.compile=false"
        )
