"""Named spans of time, and the metrics that they make.

A span costs two clock readings. On a GPU, where work is queued, its ends are events in the queue: it lasts from when
the device has finished all earlier work until it has finished the span's. Only `take` waits for that, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

ReportProgress = Callable[..., None]  # takes the parts done, all parts, and the tokens generated, if any


def uncounted(*progress: str | int) -> None:
    """Report nothing."""


_SPANS = "grpo_spans"  # an attribute of errors


def spans_around(error: BaseException) -> tuple[str, ...]:
    """Return the spans that were open when this error was raised, outermost first."""
    return getattr(error, _SPANS, ())


class Meter:
    """Wall-clock seconds by name.

    Spans of one name add up, also nested; spans of different names each count in full, so a step's time contains that
    of its phases. `on_phase` gets the names of the open spans, outermost first, whenever one opens or closes, and
    `on_progress` a span's name and what it counts.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        on_phase: Callable[[tuple[str, ...]], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_progress: ReportProgress = uncounted,
    ) -> None:
        self._device = torch.device(device)
        self._on_phase, self._on_progress = on_phase or (lambda names: None), on_progress
        self._now: Callable[[], Any] = _event if self._device.type == "cuda" else clock
        self._open: list[tuple[str, Any]] = []  # outermost first, with their starts
        self._times: list[tuple[str, Any, Any]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[ReportProgress]:
        """Time the body under `name`, even if it raises. Yield the function that reports its progress."""
        span, counts = (name, self._now()), name not in self._names()  # else the outer one counts this time
        self._open.append(span)
        self._on_phase(self._names())
        try:
            yield partial(self._on_progress, name)
        except Exception as error:
            if not spans_around(error):  # else an inner span has set it
                setattr(error, _SPANS, self._names())
            raise
        finally:
            self._times += [(*span, self._now())] * counts
            self._open.remove(span)  # not a pop: a generator's body may end out of order
            self._on_phase(self._names())

    def take(self) -> Mapping[str, float]:
        """Return `time/<name>` in seconds of all spans that have ended since the last `take`."""
        on_gpu = self._device.type == "cuda"
        if self._times and on_gpu:
            torch.cuda.synchronize(self._device)
        seconds: dict[str, float] = {}
        for name, start, end in self._times:
            taken = start.elapsed_time(end) / 1e3 if on_gpu else end - start
            seconds[f"time/{name}"] = seconds.get(f"time/{name}", 0.0) + taken
        self._times.clear()
        return seconds

    def _names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._open)


def _event() -> Any:
    """Return a mark in the GPU's queue, which can be compared once the queue has reached it."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark
