"""Named spans of time; and a null meter that costs nothing.

A span costs two clock readings. On a GPU it also waits for the device at both edges, since work is only queued there:
without that the time would land on whichever span happens to wait next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

_SPANS = "grpo_spans"  # an attribute of errors


def spans_around(error: BaseException) -> tuple[str, ...]:
    """The spans that were open where this error was raised, outermost first."""
    return getattr(error, _SPANS, ())


@dataclass(eq=False)
class _Span:
    name: str
    start: float


class WallMeter:
    """Measures wall-clock seconds by name.

    Spans of one name add up, also when they nest; spans of different names count each in full, so that a step's time
    contains that of its phases. `on_phase` hears the names of the open spans, outermost first, whenever one opens or
    closes: with it a console can say what a silent run is doing.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        on_phase: Callable[[tuple[str, ...]], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device = torch.device(device)
        self._on_phase = on_phase or (lambda names: None)
        self._clock = clock
        self._open: list[_Span] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body under `name`, also when it raises."""
        span = _Span(name, self._now())
        self._open.append(span)
        self._tell()
        try:
            yield
        except Exception as error:
            if not spans_around(error):  # else a span inside this one has said so
                setattr(error, _SPANS, self._names())
            raise
        finally:
            self._credit(span, self._now())
            self._open.remove(span)  # not a pop: the body may be a generator, which ends when it likes
            self._tell()

    def take(self) -> Mapping[str, float]:
        """`time/<name>` in seconds since the last `take`. An open span counts up to now, its rest later."""
        if self._open:
            now = self._now()
            for span in self._open:
                self._credit(span, now)
        seconds, self._seconds = self._seconds, {}
        return {f"time/{name}": value for name, value in seconds.items()}

    def _credit(self, span: _Span, now: float) -> None:
        outer = self._open[: self._open.index(span)]
        if all(span.name != other.name for other in outer):  # else that one counts this time already
            self._seconds[span.name] = self._seconds.get(span.name, 0.0) + now - span.start
        span.start = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

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
