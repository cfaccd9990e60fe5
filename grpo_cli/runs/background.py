"""Checkpoints that are written while training goes on (`train.checkpoint=lazy`; DataStates-LLM, arXiv 2406.10707).

What an update changes is copied to the host's memory and written from there, both by one thread. Only an update has to
wait, and only until the copy is made; rollouts change none of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_Pairs = list[tuple[Tensor, Tensor]]  # bytes to copy, from where to where


class Saver:
    """A writer of checkpoints: at once, or with `lazy` in the background. `span` measures the time that training waits.

    An error in the background is raised by the next `join`, or the next `save`, which joins the one before.
    """

    def __init__(self, lazy: bool, span: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.lazy, self._span = lazy, span
        self._copying: Future[None] | None = None
        self._writing: Future[object] | None = None

    def save(self, overwritten: Any, write: Callable[[Any], object], frozen: Iterable[Tensor] = ()) -> None:
        """Call `write` with what the next update overwrites: nested dictionaries, lists and tuples of tensors and plain
        values. Tensors in the storages of `frozen` never change."""
        if not self.lazy:
            write(overwritten)
            return
        self.join()
        pairs, snapshot = _snapshot(overwritten, {_place(tensor) for tensor in frozen})
        gpu = next((source.device for source, _ in pairs if source.is_cuda), None)
        # on a GPU, sources are right behind this place in its queue
        ready = None if gpu is None else torch.cuda.current_stream(gpu).record_event()
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        copying = self._copying = thread.submit(_copy, pairs, ready)
        self._writing = thread.submit(lambda: (copying.result(), write(snapshot)))
        thread.shutdown(wait=False)

    def wait_until_copied(self) -> None:
        """Wait until what is being saved is copied: before any of it changes."""
        if self._copying is not None and not self._copying.done():
            with self._span("checkpoint"):
                wait([self._copying])

    def join(self) -> None:
        """Wait until it is written. Raises what has failed there."""
        if (writing := self._writing) is not None:
            with self._span("checkpoint"):
                wait([writing])  # a signal may leave this: it stays known
            self._writing = self._copying = None
            writing.result()


def _snapshot(values: Any, frozen: set[tuple[int, int]]) -> tuple[_Pairs, Any]:
    """Return the bytes to copy, and the values with tensors that lie where these go. They share memory where the
    originals do, so that they are pickled to the same bytes."""
    pairs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    copies: dict[int, Any] = {}
    for tensor in (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)):
        storage, place = tensor.untyped_storage(), _place(tensor)
        if place in frozen:
            copies[id(tensor)] = tensor
            continue
        if place not in pairs:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            pairs[place] = source, torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
        empty, target = torch.empty(0, dtype=tensor.dtype), pairs[place][1].untyped_storage()
        copies[id(tensor)] = empty.set_(target, tensor.storage_offset(), tensor.size(), tensor.stride())
    return list(pairs.values()), copy.deepcopy(values, copies)


def _copy(pairs: _Pairs, ready: Any) -> None:
    stream = None if ready is None else torch.cuda.Stream(ready.device)
    with torch.cuda.stream(stream):  # None is no stream
        if stream is not None:
            stream.wait_event(ready)
        for source, buffer in pairs:
            buffer.copy_(source, non_blocking=stream is not None)
    if stream is not None:
        stream.synchronize()


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's storage begins, and its bytes."""
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
