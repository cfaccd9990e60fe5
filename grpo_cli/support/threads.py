"""PyTorch's number of threads on a CPU: set for a while, and numbers to try in its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def computing_with(threads: int | None) -> Iterator[None]:
    """PyTorch's number of threads, for as long as this lasts; None: as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fewer(most: int) -> Iterator[int]:
    """Powers of two.

    >>> list(fewer(8)), list(fewer(2))
    ([1, 2, 4], [1])
    """
    count = 1
    while count < most:
        yield count
        count *= 2


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes, by the clock."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
