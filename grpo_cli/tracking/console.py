"""A run on the console: a live view in a terminal, plain lines elsewhere. Keeps no records."""

from __future__ import annotations

import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grpo_cli.support import terminal as screen
from grpo_cli.support.formatting import duration, gib, plain, short
from grpo_cli.types import Record

PLAIN_SECONDS = 10.0  # between step lines of a plain run
REMINDER_SECONDS, TICK = 60.0, 1.0  # between lines of a plain run inside a long phase; between looks at the clock
FORESEEN_SECONDS, FORESEEN_SHARE, LONG_RUN = 20.0, 0.05, 3600.0  # of a first step's rollouts; of a run
HISTORY = 40  # bars in the sparkline, and steps in the estimate of the time left
PARTS = {"step", "eval", "forward", "backward", "optimizer", "prefill", "decode"}  # spans of, beside or in those shown
# A label in the view, a metric, and its format.
FACTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("completions", "response/length_mean", lambda value: f"length {value:.0f}"),
    ("completions", "turns/mean", lambda value: f"{value:.1f} turns"),
    ("completions", "response/truncated", lambda value: f"{value:.0%} cut off"),
    ("policy", "policy/entropy", lambda value: f"entropy {value:.3f}"),
    ("speed", "speed/tokens_per_second", lambda value: f"{short(value)} tokens/s"),
    ("speed", "time/step", lambda value: f"{value:.2f} s/step"),
    ("memory", "memory/peak_bytes", lambda value: f"{gib(value)} peak"),
)


@dataclass
class _Phase:
    start: float
    done: int = 0
    total: int = 0
    tokens: int = 0


class ConsoleTracker:
    """The view of a run, from its records as they come. `record.step` counts finished steps, up to `total_steps`.

    In a terminal: a view redrawn twice a second, with progress, reward, evaluation, speed, the time of each phase,
    memory, a right and a wrong completion; what does not fit into a line is cut. Otherwise (a file, a pipe, a CI log):
    a line for the first and the last step, for every one with an evaluation or ten seconds after the last line, and for
    every minute inside a phase. The tracker itself is the view (`console.print(tracker)`).
    """

    def __init__(
        self,
        total_steps: int,
        folder: Path,
        smaller: str = "",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up; the run's `folder` is named at the end, `smaller` settings when it is foreseen to be long."""
        self._total, self._folder, self._clock, self._smaller = total_steps, folder, clock, smaller
        self._console = console or screen.console()
        self._live: Live | None = None
        self._shows = False
        self._step: int | None = None  # of the newest record
        self._metrics: dict[str, float] = {}  # the newest value of every metric, so that an evaluation stays in view
        self._rewards: list[float] = []
        self._completions: dict[str, str] = {}  # the newest right and wrong one
        self._finished: deque[tuple[float, int]] = deque(maxlen=HISTORY)  # when which step was
        self._last_line = clock()
        self._phases: dict[str, _Phase] = {}  # that are open, outermost first
        self._foreseen, self._closed = False, threading.Event()

    def log(self, record: Record) -> None:
        self._show()
        self._step = step = record.step
        self._metrics.update(record.metrics)
        self._finished.append((self._clock(), step))
        if "reward/mean" in record.metrics:
            self._rewards.append(record.metrics["reward/mean"])
        self._completions |= {"right" if one.solved else "wrong": one.reply for one in record.examples}
        due = step <= 1 or step >= self._total or "eval/accuracy" in record.metrics
        if self._live is None and (due or self._clock() - self._last_line >= PLAIN_SECONDS):
            self._last_line = self._clock()
            self.say(step_line(record, self._total, self.seconds_left()))

    def phase(self, names: tuple[str, ...]) -> None:
        """Note the currently open spans, outermost first (`Meter(on_phase=...)`)."""
        self._show()
        self._phases = {name: self._phases.get(name, _Phase(self._clock())) for name in names}

    def progress(self, name: str, done: int, total: int, tokens: int = 0) -> None:
        """Note how far an open span has come (`Meter(on_progress=...)`); foresee the run's time in its first step."""
        phase = self._phases[name]
        phase.done, phase.total, phase.tokens = done, total, tokens
        waited = self._clock() - phase.start
        if name != "rollout" or self._foreseen or len(self._finished) > 1:
            return
        if waited >= FORESEEN_SECONDS and done >= FORESEEN_SHARE * total:
            self._foreseen, step_seconds = True, waited / done * total
            run_seconds = step_seconds * (self._total - (self._step or 0))
            smaller = f"; smaller steps: {self._smaller}" if self._smaller and run_seconds > LONG_RUN else ""
            step, run = duration(step_seconds), duration(run_seconds)
            self.say(f"a step's rollouts take about {step}, the run more than {run}{smaller}")

    def _phase_line(self) -> str:
        """Return the innermost open phase that counts, or else the innermost, with its progress and the time left."""
        phases = self._phases  # which another thread replaces
        name = next((name for name in reversed(phases) if phases[name].total), next(reversed(phases), ""))
        if not name:
            return ""
        phase, waited = phases[name], self._clock() - phases[name].start
        parts = [f"{name} {phase.done}/{phase.total}" if phase.total else name]
        parts += [duration(waited)] if waited >= 2 else []
        parts += [f"{short(round(phase.tokens / waited))} tokens/s"] if waited >= 2 and phase.tokens else []
        left = waited / phase.done * (phase.total - phase.done) if phase.done else 0.0
        return " ".join(parts) + (f", {duration(left)} left" if left >= 2 else "")

    def _remind(self) -> None:
        """Print a line a minute inside a phase, until the run ends."""
        while not self._closed.wait(TICK):
            if self._phases and self._clock() - self._last_line >= REMINDER_SECONDS:
                self._last_line = self._clock()
                self.say(f"step {(self._step or 0) + 1}/{self._total}  {self._phase_line()}")

    def say(self, text: str) -> None:
        """Print a line, above the live view if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Leave the view's last frame on the screen, and print how the run ended below it."""
        self._closed.set()
        self._phases = {}
        if self._live is not None:
            self._live.stop()
        for line in ending(summary, self._total, self._folder, self._metrics):
            self.say(line)

    def seconds_left(self) -> float | None:
        """Return the estimate from the steps so far; None before there are two."""
        if len(self._finished) < 2:
            return None
        (then, first), (now, last) = self._finished[0], self._finished[-1]
        return (now - then) / max(last - first, 1) * (self._total - last)

    def _show(self) -> None:
        """Begin to show the run, at its first phase or record. In a terminal, earlier lines stay above the view."""
        if self._shows:
            return
        self._shows = True
        # With FORCE_COLOR rich takes a file for a terminal.
        if self._console.is_terminal and self._console.file.isatty() and not self._console.is_dumb_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=2)
            self._live.start()
        else:
            threading.Thread(target=self._remind, daemon=True).start()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        left = self.seconds_left()
        parts = ["starting" if self._step is None else f"step {min(self._step + 1, self._total)}/{self._total}"]
        parts += [f"{duration(left)} left"] if left else []
        yield Text("  ".join([*parts, self._phase_line()]).rstrip(), no_wrap=True, overflow="ellipsis")
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True, min_width=len("eval accuracy"))
        rows.add_column(no_wrap=True, overflow="ellipsis")
        for name, text in self._rows(bars=console.encoding.startswith("utf")).items():
            rows.add_row(name, Text(text))
        yield rows

    def _rows(self, bars: bool) -> dict[str, str]:
        """Return the text beside each label."""
        seen, rows = self._metrics, dict[str, str]()
        if self._rewards:
            parts = np.array_split(self._rewards, min(HISTORY, len(self._rewards)))  # of the whole run
            rows["reward"] = f"{self._rewards[-1]:.3f}  " + _sparkline([float(part.mean()) for part in parts]) * bars
        if "eval/accuracy" in seen:
            rows["eval accuracy"] = _accuracy(seen)
        for label, name, text in FACTS:
            if name in seen:
                rows[label] = f"{rows[label]}  {text(seen[name])}" if label in rows else text(seen[name])
        phases = {name.removeprefix("time/"): seen[name] for name in seen if name.startswith("time/")}
        slowest = sorted(phases.keys() - PARTS, key=lambda name: -phases[name])
        rows |= {"time": "  ".join(f"{name} {phases[name]:.2f} s" for name in slowest)} if slowest else {}
        return rows | {label: plain(self._completions[label]) for label in sorted(self._completions)}


def _sparkline(values: Sequence[float]) -> str:
    """Return the values as bars of eight heights over their range."""
    low, span = min(values), max(values) - min(values)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / span) if span else 3] for value in values)


def step_line(record: Record, total: int, left: float | None) -> str:
    """Return a record in one line: reward, evaluation, completions, entropy, speed, memory and time, as available."""
    seen = record.metrics
    parts = [f"step {record.step:>{len(str(total))}}/{total}"]
    parts += [f"reward {seen['reward/mean']:.3f}"] if "reward/mean" in seen else []
    parts += [f"eval {_accuracy(seen)}"] if "eval/accuracy" in seen else []
    parts += [text(seen[name]) for _, name, text in FACTS if name in seen]
    parts += [f"{duration(left)} left"] if left is not None and record.step < total else []
    return "  ".join(parts)


def _accuracy(seen: Mapping[str, float]) -> str:
    return f"{seen['eval/accuracy']:.3f} ({certainty(seen)})"


def certainty(seen: Mapping[str, float]) -> str:
    """Return the 95% interval of an accuracy, and the number of problems solved."""
    found, low, high, count = (seen[f"eval/{it}"] for it in "accuracy accuracy_low accuracy_high problems".split())
    return f"{low:.3f} to {high:.3f}, {found * count:.0f} of {count:.0f}"


def ending(summary: Mapping[str, Any], total: int, folder: Path, seen: Mapping[str, float]) -> Iterator[str]:
    """Yield how a run ended, and what to type next. The rest is in its `summary.json`."""
    status, step, accuracy = summary["status"], summary["step"], summary["final_accuracy"]
    by = f" ({summary['stopped_by']})" if summary["stopped_by"] else ""
    reached = ""
    if accuracy is not None:
        before = f"{summary['first_accuracy']:.3f} -> " if summary["final_accuracy_step"] else ""
        reached = f", accuracy {before}{_accuracy(seen) if 'eval/accuracy' in seen else f'{accuracy:.3f}'}"
    yield f"{status} at step {step} of {total}{by}{reached}; {duration(summary['train_seconds'])} of training"
    here = Path.cwd()
    place = shlex.quote(plain(folder.relative_to(here) if folder.is_relative_to(here) else folder))
    if step:
        yield f"its completions: grpo show {place}"
        yield f"its curves:      grpo report {place}"
    if status == "completed":
        yield f"its model:       grpo export {place} <new folder>"
    else:
        yield f"go on with it:   grpo train resume={place}"
