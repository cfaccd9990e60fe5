"""Named spans of time; and a null meter that costs nothing.

A span costs two clock readings. On a GPU, where work is queued, its ends are events in the queue: it lasts from when
the device has finished all earlier work until it has finished the span's. Only `take` waits for that, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

_SPANS = "grpo_spans"  # an attribute of errors


def spans_around(error: BaseException) -> tuple[str, ...]:
    """The spans that were open when this error was raised, outermost first."""
    return getattr(error, _SPANS, ())


@dataclass(eq=False)
class _Span:
    name: str
    start: Any  # a reading of the meter's clock


class _HostClock:
    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        """Nothing to wait for."""


class _DeviceClock:
    """Events in a GPU's queue, which can be compared once the queue has reached them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


class WallMeter:
    """Measures wall-clock seconds by name.

    Spans of one name add up, also nested; spans of different names each count in full, so a step's time contains that
    of its phases. `on_phase` gets the names of the open spans, outermost first, whenever one opens or closes.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        on_phase: Callable[[tuple[str, ...]], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        device = torch.device(device)
        self._on_phase = on_phase or (lambda names: None)
        self._clock = _DeviceClock(device) if device.type == "cuda" else _HostClock(clock)
        self._open: list[_Span] = []
        self._times: list[tuple[str, Any, Any]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body under `name`, even if it raises."""
        span = _Span(name, self._clock.now())
        self._open.append(span)
        self._tell()
        try:
            yield
        except Exception as error:
            if not spans_around(error):  # else an inner span has set it
                setattr(error, _SPANS, self._names())
            raise
        finally:
            self._credit(span, self._clock.now())
            self._open.remove(span)  # not a pop: a generator's body may end out of order
            self._tell()

    def take(self) -> Mapping[str, float]:
        """`time/<name>` in seconds since the last `take`. An open span counts up to now, the rest next time."""
        if self._open:
            now = self._clock.now()
            for span in self._open:
                self._credit(span, now)
        if self._times:
            self._clock.settle()
        seconds: dict[str, float] = {}
        for name, start, end in self._times:
            seconds[f"time/{name}"] = seconds.get(f"time/{name}", 0.0) + self._clock.seconds(start, end)
        self._times.clear()
        return seconds

    def _credit(self, span: _Span, now: Any) -> None:
        outer = self._open[: self._open.index(span)]
        if all(span.name != other.name for other in outer):  # else that span counts this time
            self._times.append((span.name, span.start, now))
        span.start = now

    def _names(self) -> tuple[str, ...]:
        return tuple(span.name for span in self._open)

    def _tell(self) -> None:
        self._on_phase(self._names())


class NullMeter:
    """Measures nothing, at no cost."""

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def take(self) -> Mapping[str, float]:
        return {}
