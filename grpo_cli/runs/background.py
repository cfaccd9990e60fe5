"""Checkpoints that are written while training goes on (`train.checkpoint=lazy`; DataStates-LLM, arXiv 2406.10707).

What an update changes is copied to buffers in the host's memory, which are used again each time, and written from
there, both by one thread. Only an update has to wait, and only until the copy is made; rollouts change none of it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

Place = tuple[int, int]  # where a storage begins, and its bytes


class Saver:
    """Saves at once, or with `lazy` in the background, one at a time. `span` measures what that keeps training from.

    What fails in the background is raised by the next `join`, or the next `save`, which joins the one before.
    """

    def __init__(self, lazy: bool, span: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.lazy, self._span = lazy, span
        self._buffers: dict[int, list[Tensor]] = {}  # by their bytes
        self._copied = Event()
        self._copied.set()
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._seconds: float | None = None

    def save(self, moving: Any, write: Callable[[Any], object], frozen: Iterable[Tensor] = ()) -> None:
        """Call `write` with `moving`: nested dictionaries, lists and tuples of tensors and plain values, of whose
        tensors only those in the storages of `frozen` will never change."""
        if not self.lazy:
            write(moving)
            return
        self.join()
        pairs, snapshot = self._snapshot(moving, {_place(tensor) for tensor in frozen})
        ready = _mark(source for source, _ in pairs)
        self._copied.clear()
        self._thread = Thread(target=self._work, args=(pairs, ready, snapshot, write), name="checkpoint")
        self._thread.start()

    def settle(self) -> None:
        """Wait until what is being saved is copied: before any of it changes."""
        if not self._copied.is_set():
            with self._span("checkpoint"):
                self._copied.wait()

    def join(self) -> None:
        """Wait until it is written. Raises what has failed there."""
        if self._thread is not None:
            with self._span("checkpoint"):
                self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def take(self) -> Mapping[str, float]:
        """The seconds that the thread has taken for what was written since the last `take`, as a metric."""
        seconds, self._seconds = self._seconds, None
        return {} if seconds is None else {"time/checkpoint_write": seconds}

    def _work(self, pairs: list[tuple[Tensor, Tensor]], ready: Any, snapshot: Any, write: Callable[[Any], Any]) -> None:
        start = time.perf_counter()
        try:
            try:
                _copy(pairs, ready)
            finally:
                pairs.clear()  # what was parked or replaced since then is free
                self._copied.set()
            write(snapshot)
        except BaseException as error:
            self._error = error
        self._seconds = (self._seconds or 0.0) + time.perf_counter() - start

    def _snapshot(self, moving: Any, frozen: set[Place]) -> tuple[list[tuple[Tensor, Tensor]], Any]:
        """The bytes to copy, from where to where; and `moving` with tensors that lie there, which share memory where
        the originals do, so that it is pickled to the same bytes."""
        free, self._buffers = self._buffers, {}
        pairs: dict[Place, tuple[Tensor, Tensor]] = {}
        same: dict[int, Any] = {}
        for tensor in _tensors(moving):
            storage, place = tensor.untyped_storage(), _place(tensor)
            if place in frozen:
                same[id(tensor)] = tensor
                continue
            if place not in pairs:
                source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                pairs[place] = source, self._buffer(storage.nbytes(), tensor.is_cuda, free)
            buffer = pairs[place][1].untyped_storage()
            empty = torch.empty(0, dtype=tensor.dtype)
            same[id(tensor)] = empty.set_(buffer, tensor.storage_offset(), tensor.size(), tensor.stride())
        return list(pairs.values()), copy.deepcopy(moving, same)

    def _buffer(self, size: int, pinned: bool, free: dict[int, list[Tensor]]) -> Tensor:
        known = free.get(size)
        buffer = known.pop() if known else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._buffers.setdefault(size, []).append(buffer)
        return buffer


def _copy(pairs: list[tuple[Tensor, Tensor]], ready: Any) -> None:
    if ready is None:
        for source, buffer in pairs:
            buffer.copy_(source)
        return
    stream = torch.cuda.Stream(ready.device)
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        for source, buffer in pairs:
            buffer.copy_(source, non_blocking=True)
    stream.synchronize()


def _mark(sources: Iterable[Tensor]) -> Any:
    """The place in a GPU's queue behind which the sources are as they are to be saved; None if all are on the host."""
    device = next((source.device for source in sources if source.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


def _place(tensor: Tensor) -> Place:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for item in value.values() for tensor in _tensors(item))
    elif isinstance(value, list | tuple):
        yield from (tensor for item in value for tensor in _tensors(item))
