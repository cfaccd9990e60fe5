"""The number of threads of PyTorch's operations on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SMALL = 5_000_000  # weights


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Set PyTorch's number of threads, for as long as this lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(wanted: int | str, model: Any, most: int) -> int:
    """Return the number that was typed; for auto PyTorch's number, at most `most` for a small model, whose operations
    take microseconds, which waking more threads slows down."""
    if isinstance(wanted, int):
        return wanted
    weights = list(model.parameters())
    is_small = weights[0].device.type == "cpu" and sum(weight.numel() for weight in weights) < SMALL
    return min(most, torch.get_num_threads()) if is_small else torch.get_num_threads()
