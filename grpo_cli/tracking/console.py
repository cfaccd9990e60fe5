"""What a person sees while a run goes on: a live view in a terminal, plain lines elsewhere. Keeps no records.

Nothing here is written by the model: prompts and replies are in `rollouts.jsonl`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_cli.formatting import duration, short, size, sparkline
from grpo_cli.tracking import terminal as screen
from grpo_cli.types import Record

PLAIN_LINES = 100  # about how many step lines a plain run prints
PLAIN_SECONDS = 10.0  # but never later than this after the last one
STILL_SECONDS = 60.0  # a plain run says after this long, then after twice as long, what it is waiting for
HISTORY = 40  # steps in the sparkline, and in the estimate of the time left


class ConsoleTracker:
    """Shows records as they come. `record.step` counts finished steps, up to `total_steps`.

    In a terminal: a view that redraws itself twice a second, with progress, reward, evaluation, speed, the time of
    each phase, memory and the last warning. Otherwise (a file, a pipe, a CI log): a line for about every hundredth of
    the run, for every step that ends ten seconds after the last line, and for every step with an evaluation; and when
    a phase takes long, a line that names it.
    """

    def __init__(
        self, total_steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or screen.console()
        self._total = total_steps
        self._clock = clock
        self._live: Live | None = None
        self._metrics: dict[str, float] = {}  # the newest value of every metric, so that an evaluation stays in view
        self._started: float | None = None
        self._step: int | None = None  # of the newest record
        self._eval_step = 0
        self._rewards: deque[float] = deque(maxlen=HISTORY)
        self._finished: deque[tuple[float, int]] = deque(maxlen=HISTORY)
        self._warning: tuple[int, str] | None = None
        self._phases: tuple[str, ...] = ()
        self._phase_start = self._last_line = clock()
        self._reminders = 0
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to show the run, at its first phase or record at the latest. Lines said before stay above the view."""
        if self._started is not None:
            return
        self._started = self._clock()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._view, console=self._console, refresh_per_second=2)
            self._live.start()
        else:
            threading.Thread(target=self._keep_reminding, daemon=True).start()

    def log(self, record: Record) -> None:
        self.start()
        now = self._clock()
        if self._step is None and record.step > 0 and self._started is not None and self._started < now:
            self._finished.append((self._started, record.step - 1))  # a resumed run begins somewhere on the way
        self._step = record.step  # if it is 0: what came before it was no step, and says nothing of how long one takes
        self._metrics.update(record.metrics)
        self._finished.append((now, record.step))
        if "reward/mean" in record.metrics:
            self._rewards.append(record.metrics["reward/mean"])
        evaluated = "eval/accuracy" in record.metrics
        if evaluated:
            self._eval_step = record.step
        if self._live is None and (evaluated or self._line_due(record.step, now)):
            self._last_line = now
            self.say(step_line(record, self._total, self._seconds_left()))

    def phase(self, names: tuple[str, ...]) -> None:
        """Which spans are open now, outermost first: what the run is busy with (`WallMeter(on_phase=...)`)."""
        self.start()
        self._phases, self._phase_start, self._reminders = names, self._clock(), 0

    def say(self, text: str) -> None:
        """One line, above the live view if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A warning: a line like any other, and kept in view."""
        self._warning = (self._step or 0, text)
        self._console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Leave the view's last frame on the screen, and under it how the run ended."""
        self._closed.set()
        if self._live is not None:
            self._phases = ()
            self._live.stop()
            self._live = None
        self.say(summary_line(summary))

    def _line_due(self, step: int, now: float) -> bool:
        every = max(1, math.ceil(self._total / PLAIN_LINES))
        ends = step <= 1 or step >= self._total
        return ends or step % every == 0 or now - self._last_line >= PLAIN_SECONDS

    def _seconds_left(self) -> float | None:
        if not self._finished:
            return None
        (then, first), (now, last) = self._finished[0], self._finished[-1]
        return (now - then) / (last - first) * (self._total - last) if last > first else None

    def _keep_reminding(self) -> None:
        while not self._closed.wait(1.0):
            reminder = self._reminder()
            if reminder:
                self.say(reminder)

    def _reminder(self) -> str | None:
        waited = self._clock() - self._phase_start
        if not self._phases or waited < STILL_SECONDS * 2**self._reminders:
            return None
        self._reminders += 1
        where = "" if self._step is None else f"after step {self._step}: "
        return f"{where}still in {self._phases[-1]}, for {duration(waited)}"

    def _view(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="ellipsis", no_wrap=True)
        for name, text in self._rows():
            rows.add_row(name, text)
        if self._warning is None:
            return Group(self._progress(), rows)
        step, warning = self._warning  # whole above the view, where it was said
        last = Text(f"! step {step}: {warning}", style="yellow", overflow="ellipsis", no_wrap=True)
        return Group(self._progress(), rows, last)

    def _progress(self) -> RenderableType:
        left = self._seconds_left()
        line = Table.grid(padding=(0, 2))
        line.add_row(
            Text("starting" if self._step is None else f"step {self._step}/{self._total}", style="bold"),
            ProgressBar(total=max(self._total, 1), completed=self._step or 0, width=30),
            Text("" if left is None or left <= 0 else f"{duration(left)} left"),
            Text(self._doing(), style="dim"),
        )
        return line

    def _doing(self) -> str:
        waited = self._clock() - self._phase_start
        return "" if not self._phases else f"{self._phases[-1]}" + (f" {duration(waited)}" if waited >= 2 else "")

    def _rows(self) -> list[tuple[str, Text]]:
        seen = self._metrics
        rows = []
        if self._rewards:
            bars = sparkline(list(self._rewards)) if self._console.encoding.startswith("utf") else ""
            rows.append(("reward", Text(f"{self._rewards[-1]:.3f}  {bars}")))
        if "eval/accuracy" in seen:
            ends = [seen.get("eval/accuracy_low"), seen.get("eval/accuracy_high")]
            interval = "" if None in ends else f"  ({ends[0]:.3f} to {ends[1]:.3f})"
            rows.append(("eval accuracy", Text(f"{seen['eval/accuracy']:.3f}{interval}  at step {self._eval_step}")))
        for name, parts in (("replies", _replies(seen)), ("speed", _speed(seen)), ("time", _phase_times(seen))):
            if parts:
                rows.append((name, Text("  ".join(parts))))
        if "memory/peak_bytes" in seen:
            rows.append(("memory", Text(f"{size(seen['memory/peak_bytes'])} peak")))
        return rows


def step_line(record: Record, total: int, left: float | None) -> str:
    """A record in one line: what there is of reward, evaluation, replies, speed, memory and time."""
    seen = record.metrics
    parts = [f"step {record.step:>{len(str(total))}}/{total}"]
    parts += [f"reward {seen['reward/mean']:.3f}"] if "reward/mean" in seen else []
    parts += [f"eval {seen['eval/accuracy']:.3f}"] if "eval/accuracy" in seen else []
    parts += _replies(seen) + _speed(seen)
    parts += [size(seen["memory/peak_bytes"])] if "memory/peak_bytes" in seen else []
    parts += [f"{duration(left)} left"] if left is not None and record.step < total else []
    return "  ".join(parts)


def _replies(seen: Mapping[str, float]) -> list[str]:
    parts = [f"length {seen['response/length_mean']:.0f}"] if "response/length_mean" in seen else []
    return parts + ([f"{seen['response/truncated']:.0%} cut off"] if "response/truncated" in seen else [])


def _speed(seen: Mapping[str, float]) -> list[str]:
    parts = [f"{short(seen['speed/tokens_per_second'])} tokens/s"] if "speed/tokens_per_second" in seen else []
    return parts + ([f"{seen['time/step']:.2f} s/step"] if "time/step" in seen else [])


def _phase_times(seen: Mapping[str, float]) -> list[str]:
    times = {name.removeprefix("time/"): value for name, value in seen.items() if name.startswith("time/")}
    times.pop("step", None)
    return [f"{name} {value:.2f} s" for name, value in sorted(times.items(), key=lambda item: -item[1])]


def summary_line(summary: Mapping[str, Any]) -> str:
    """How a run ended: its status, then every other plain value of the summary."""
    parts = [str(summary.get("status", "ended"))]
    for name, value in summary.items():
        if name != "status" and isinstance(value, str | int | float):
            if isinstance(value, str | bool):
                parts.append(f"{name} {value}")
            else:
                parts.append(f"{name} {size(value) if name.endswith('bytes') else short(value)}")
    return "  ".join(parts)
