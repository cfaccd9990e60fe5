"""Decode steps of fixed shape, so that a GPU can replay each as one CUDA graph instead of hundreds of launches.

A step is a forward pass and the drawing after it. Rows come in few numbers and tables in one width (`RunningBatch` with
`fill`), so few shapes occur.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from grpo_cli.engine.sequence import Rows

# For each row: its last hidden state [R, H], its next token and that token's log-probability.
StepOutput = tuple[Tensor, ...]
# Runs the function, and returns its results and a function that replays it with the same addresses.
Capture = Callable[[Callable[[], StepOutput]], tuple[StepOutput, Callable[[], StepOutput]]]


class GraphedSteps:
    """Steps, each captured when its shape occurs again: capturing costs about three launched steps."""

    def __init__(self, capture: Capture) -> None:
        self._capture, self._seen = capture, set[Hashable]()
        self._captured: dict[Hashable, tuple[list[Tensor], Callable[[], StepOutput]]] = {}

    def __call__(self, step: Callable[[Rows], StepOutput], rows: Rows) -> StepOutput:
        given = _tensors_of(rows)
        shape = (rows.sampling.flags, *(tensor.shape for tensor in given))
        if shape in self._captured:
            inputs, replay = self._captured[shape]
            torch._foreach_copy_(inputs, given)
            return replay()
        if shape not in self._seen:
            self._seen.add(shape)
            return step(rows)
        own = _cloned(rows)
        result, replay = self._capture(lambda: step(own))
        self._captured[shape] = _tensors_of(own), replay
        return result


def _tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors in nested dataclasses."""
    if is_dataclass(value):
        return [tensor for part in vars(value).values() for tensor in _tensors_of(part)]
    return [value] if isinstance(value, Tensor) else []


def _cloned(value: Any) -> Any:
    """Return a copy with cloned tensors."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: _cloned(part) for name, part in vars(value).items()})
    return value.clone() if isinstance(value, Tensor) else value


@cache
def _stream() -> Any:
    """Return the stream (of torch.cuda) of all captures: libraries keep a workspace for each."""
    return torch.cuda.Stream()


class CudaGraphs:
    """A recorder of the kernels that a function launches; every replay overwrites its results.

    All graphs of one object share one memory pool, as large as the largest needs. So a replay may overwrite the results
    of another graph: read them first.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream()

    def __call__(self, run: Callable[[], StepOutput]) -> tuple[StepOutput, Callable[[], StepOutput]]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Libraries allocate and choose kernels in their first call on a stream, which must not be recorded.
            first = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Work of other threads on the device is not captured.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run()

        def replay() -> StepOutput:
            graph.replay()
            return result

        return first, replay
