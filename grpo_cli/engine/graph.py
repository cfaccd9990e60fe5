"""Decode steps of fixed shape, so that a GPU can replay each as one CUDA graph in place of some hundred launches.

Every slot is a row, running or not, and what else a shape depends on (slot keys looked at, rows per prompt) is rounded
up to a power of two, so that few shapes occur. `Decoder.step` is the reference: padding changes no bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.attention import Rows, Watch
from grpo_cli.engine.cache import KvArena

# A shape is captured when it comes up for this many-th time: capturing costs several steps.
WORTH_CAPTURING = 4


# One decode step (`Decoder.step`): the last hidden state of each row.
Step = Callable[[Rows, KvArena, Watch], Tensor]
# Runs the function until its kernels are loaded, and returns what repeats it from the same addresses to the same ones.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class FixedSteps:
    """Runs steps of fixed shape through `step`, and captures the shapes that come up often.

    Belongs to one generation: what is captured holds the addresses of its slots and prompts. Capturing runs a step that
    is then run once more, within `repeated`, which undoes what may be done once only.
    """

    def __init__(self, step: Step, capture: Capture, repeated: Callable[[], AbstractContextManager[None]]) -> None:
        self._step, self._capture, self._repeated = step, capture, repeated
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._captured: dict[tuple[Any, ...], tuple[Rows, Callable[[], Tensor]]] = {}

    @property
    def captured(self) -> int:
        """How many shapes have been captured."""
        return len(self._captured)

    def __call__(self, rows: Rows, kv: KvArena, watch: Watch) -> Float[Tensor, "R H"]:
        """As `Decoder.step`; `rows` are all slots of one generation (`Slots` with `fixed`)."""
        # A block that has grown lies elsewhere; its size, unlike its address, never comes back.
        ways = (way for pieces in (rows.own, rows.prompt) for way in (pieces.whole, pieces.in_order))
        shape = (rows.width, kv.tokens, *ways, *(tensor.shape for tensor in _tensors(rows)))
        if shape not in self._captured:
            self._seen[shape] += 1
            if self._seen[shape] < WORTH_CAPTURING:
                return self._step(rows, kv, watch)
            own = _copied(rows)
            with self._repeated():
                self._captured[shape] = own, self._capture(lambda: self._step(own, kv, watch))
        own, replay = self._captured[shape]
        torch._foreach_copy_(_tensors(own), _tensors(rows))
        return replay()


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in a dataclass."""
    if isinstance(value, Tensor):
        return [value]
    return [t for f in fields(value) for t in _tensors(getattr(value, f.name))] if is_dataclass(value) else []


def _copied(value: Any) -> Any:
    """The same dataclass with tensors of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{f.name: _copied(getattr(value, f.name)) for f in fields(value)})


class CudaGraphs:
    """Records the kernels that a function launches; its result lies at one address, overwritten by every replay.

    All graphs of one object have their intermediate results in one pool of memory, which is as large as the largest
    needs and not as all do. So a replay may overwrite what another graph returned: read it before.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Libraries allocate and choose kernels in their first calls, which must not be recorded. A decode step may
            # be repeated: it writes the same keys to the same places.
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on meanwhile: what they ask of the device is no part of this.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
