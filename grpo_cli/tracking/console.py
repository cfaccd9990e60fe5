"""A run on the console: a live view in a terminal, plain lines elsewhere. Keeps no records.

It prints no text of the model: prompts and completions are in `rollouts.jsonl`.
"""

from __future__ import annotations

import io
import math
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.text import Text

from grpo_cli.support import terminal as screen
from grpo_cli.support.formatting import duration, plain, short, size, sparkline
from grpo_cli.types import Record

PLAIN_LINES = 100  # about how many step lines a plain run prints
PLAIN_SECONDS = 10.0  # but at least one this long after the last
HISTORY = 40  # steps in the sparkline, and in the estimate of the time left
GAP = 2  # columns between parts of a line
BAR = 30  # most columns of the progress bar
LEAST_BAR = 8  # a shorter bar is left out
LABEL = len("eval accuracy") + GAP  # columns of the labels
# A label in the view, a metric, and its format; an empty text is left out.
FACTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("completions", "response/length_mean", lambda value: f"length {value:.0f}"),
    ("completions", "turns/mean", lambda value: f"{value:.1f} turns"),
    ("completions", "response/truncated", lambda value: f"{value:.0%} cut off"),
    ("policy", "policy/entropy", lambda value: f"entropy {value:.3f}"),
    ("speed", "speed/tokens_per_second", lambda value: f"{short(value)} tokens/s"),
    ("speed", "time/step", lambda value: f"{value:.2f} s/step"),
    ("memory", "memory/peak_bytes", lambda value: f"{size(value)} peak"),
    ("workers", "engine/workers", lambda value: f"{value:.0f}"),
    ("workers", "engine/weight_update_seconds", lambda value: f"weights {value:.2f} s"),
    ("workers", "engine/requests_again", lambda value: f"{value:.0f} requests again" if value else ""),
)


class RunView:
    """The current state of a run as a rich renderable (`console.print(view)`).

    Parts that do not fit into a line are left out, the last ones first; labels and numbers are never cut.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total_steps
        self.step: int | None = None  # of the newest record
        self.phases: tuple[str, ...] = ()
        self._clock = clock
        self._metrics: dict[str, float] = {}  # the newest value of every metric, so that an evaluation stays in view
        self._started: float | None = None
        self._eval_step = 0
        self._rewards: deque[float] = deque(maxlen=HISTORY)
        self._finished: deque[tuple[float, int]] = deque(maxlen=HISTORY)
        self._warning: tuple[int, str] | None = None
        self._phase_start = clock()

    def start(self) -> None:
        self._started = self._clock()

    def add(self, record: Record) -> None:
        now = self._clock()
        if self.step is None and record.step > 0 and self._started is not None and self._started < now:
            self._finished.append((self._started, record.step - 1))  # a resumed run does not begin at 0
        self.step = record.step  # what precedes record 0 is not a step, and is not timed
        self._metrics.update(record.metrics)
        self._finished.append((now, record.step))
        if "reward/mean" in record.metrics:
            self._rewards.append(record.metrics["reward/mean"])
        if "eval/accuracy" in record.metrics:
            self._eval_step = record.step

    def interval(self, summary: Mapping[str, Any]) -> str:
        """Return the interval of the last evaluation, if the summary has its accuracy."""
        is_last = "eval/accuracy" in self._metrics and self._metrics["eval/accuracy"] == summary.get("final_accuracy")
        return _certainty(self._metrics) if is_last else ""

    def phase(self, names: tuple[str, ...]) -> None:
        self.phases, self._phase_start = names, self._clock()

    def warn(self, text: str) -> None:
        self._warning = (self.step or 0, text)

    def seconds_left(self) -> float | None:
        if not self._finished:
            return None
        (then, first), (now, last) = self._finished[0], self._finished[-1]
        return (now - then) / (last - first) * (self.total - last) if last > first else None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        room, fancy = options.max_width - LABEL, console.encoding.startswith("utf")
        yield self._progress(options.max_width, "━" if fancy else "-")
        for name, parts in self._rows(room, bars=fancy).items():
            label = Text(name.ljust(LABEL), style="dim", no_wrap=True, overflow="ellipsis")
            yield label.append(fitting(parts, room), style="not dim")
        if self._warning is not None:
            step, warning = self._warning  # printed in full above the view
            yield Text(f"! step {step}: {warning}", style="yellow", overflow="ellipsis", no_wrap=True)

    def _progress(self, width: int, line: str) -> Text:
        """Return the step, a progress bar drawn with `line` if there is room, the time left, and the current phase."""
        left, step = self.seconds_left(), "starting" if self.step is None else f"step {self.step}/{self.total}"
        parts = fitting([step, *([f"{duration(left)} left"] if left else []), *self._doing()], width)
        text = Text(no_wrap=True, overflow="ellipsis").append(step, "bold")
        if (bar := min(BAR, width - len(parts) - GAP)) >= LEAST_BAR:
            done = bar * (self.step or 0) // max(self.total, 1)
            text.append(" " * GAP).append(line * done, "bar.complete").append(line * (bar - done), "bar.back")
        return text.append(parts[len(step) :], "dim")

    def _doing(self) -> list[str]:
        waited = self._clock() - self._phase_start
        return [phase + f" {duration(waited)}" * (waited >= 2) for phase in self.phases[-1:]]

    def _rows(self, room: int, bars: bool) -> dict[str, list[str]]:
        """Return the parts beside each label, the most important first."""
        seen, rows = self._metrics, {}
        if self._rewards:
            reward = f"{self._rewards[-1]:.3f}"
            latest = list(self._rewards)[-max(1, room - len(reward) - GAP) :]
            rows["reward"] = [reward, *([sparkline(latest)] if bars else [])]
        if "eval/accuracy" in seen:
            rows["eval accuracy"] = [*_accuracy(seen), f"at step {self._eval_step}"]
        for label, name, text in FACTS:
            if name in seen and (part := text(seen[name])):
                rows.setdefault(label, []).append(part)
        phases = [name for name in seen if name.startswith("time/") and name != "time/step"]
        if phases:
            slowest = sorted(phases, key=lambda name: -seen[name])
            rows["time"] = [f"{name.removeprefix('time/')} {seen[name]:.2f} s" for name in slowest]
        return rows


def fitting(parts: Sequence[str], width: int) -> str:
    """Return as many of the first parts as fit into a line, at least one.

    >>> fitting(["update 0.70 s", "rollout 0.60 s", "eval 0.10 s"], 30)
    'update 0.70 s  rollout 0.60 s'
    """
    line = parts[0]
    for part in parts[1:]:
        if len(line) + GAP + len(part) > width:
            break
        line += " " * GAP + part
    return line


def picture(records: Sequence[Record], total_steps: int, width: int = 100, title: str = "grpo train") -> str:
    """Return the view after these records as an SVG, timed by the records' own `clock/train_seconds`."""
    now = 0.0
    view = RunView(total_steps, clock=lambda: now)
    for record in records:
        now = record.metrics.get("clock/train_seconds", 0.0)
        view.add(record)
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True, color_system="truecolor")
    console.print(view)
    return console.export_svg(title=title)


class ConsoleTracker:
    """Shows records as they come. `record.step` counts finished steps, up to `total_steps`.

    In a terminal: a view redrawn twice a second, with progress, reward, evaluation, speed, the time of each phase,
    memory and the last warning. Otherwise (a file, a pipe, a CI log): a line for about every hundredth of the run, for
    every step that ends ten seconds after the last line, and for every step with an evaluation.
    """

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        folder: Path | None = None,
    ) -> None:
        """Set up; the run's `folder` is named at the end."""
        self.view = RunView(total_steps, clock)
        self._folder = folder
        self._console = console or screen.console()
        self._clock = clock
        self._live: Live | None = None
        self._started = False
        self._last_line = clock()

    def start(self) -> None:
        """Begin to show the run, at its first phase or record at the latest. Earlier lines stay above the view."""
        if self._started:
            return
        self._started = True
        self.view.start()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self.view, console=self._console, refresh_per_second=2)
            self._live.start()

    def log(self, record: Record) -> None:
        self.start()
        self.view.add(record)
        if self._live is None and ("eval/accuracy" in record.metrics or self._line_due(record.step)):
            self._last_line = self._clock()
            self.say(step_line(record, self.view.total, self.view.seconds_left()))

    def phase(self, names: tuple[str, ...]) -> None:
        """Note the currently open spans, outermost first (`WallMeter(on_phase=...)`)."""
        self.start()
        self.view.phase(names)

    def say(self, text: str) -> None:
        """Print a line, above the live view if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning, and keep it in view."""
        self.view.warn(text)
        self._console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Leave the view's last frame on the screen, and print how the run ended below it."""
        if self._live is not None:
            self.view.phase(())
            self._live.stop()
            self._live = None
        for line in ending(summary, self.view.total, self._folder, self.view.interval(summary)):
            self.say(line)

    def _line_due(self, step: int) -> bool:
        every = max(1, math.ceil(self.view.total / PLAIN_LINES))
        ends = step <= 1 or step >= self.view.total
        return ends or step % every == 0 or self._clock() - self._last_line >= PLAIN_SECONDS


def step_line(record: Record, total: int, left: float | None) -> str:
    """Return a record in one line: reward, evaluation, completions, entropy, speed, memory and time, as available."""
    seen = record.metrics
    parts = [f"step {record.step:>{len(str(total))}}/{total}"]
    parts += [f"reward {seen['reward/mean']:.3f}"] if "reward/mean" in seen else []
    parts += [f"eval {' '.join(_accuracy(seen))}"] if "eval/accuracy" in seen else []
    parts += [text(seen[name]) for label, name, text in FACTS if name in seen and label != "workers"]
    parts += [f"{duration(left)} left"] if left is not None and record.step < total else []
    return "  ".join(parts)


def _accuracy(seen: Mapping[str, float]) -> list[str]:
    certainty = _certainty(seen)
    return [f"{seen['eval/accuracy']:.3f}", *([f"({certainty})"] if certainty else [])]


def _certainty(seen: Mapping[str, float]) -> str:
    """Return the accuracy's interval and the number of problems solved, as far as known."""
    parts = []
    if "eval/accuracy_low" in seen and "eval/accuracy_high" in seen:
        parts.append(f"{seen['eval/accuracy_low']:.3f} to {seen['eval/accuracy_high']:.3f}")
    if (count := seen.get("eval/problems")) is not None:
        parts.append(f"{seen['eval/accuracy'] * count:.0f} of {count:.0f}")
    return ", ".join(parts)


def ending(summary: Mapping[str, Any], total: int, folder: Path | None = None, interval: str = "") -> Iterator[str]:
    """Return how a run ended and where it is; for an unfinished run, how to resume it. The rest is in its
    `summary.json`."""
    status, step, accuracy = summary.get("status", "ended"), summary.get("step"), summary.get("final_accuracy")
    parts = [str(status) if step is None else f"{status} at step {step} of {total}"]
    if summary.get("stopped_by"):
        parts[0] += f" ({summary['stopped_by']})"
    if accuracy is not None:
        when = summary.get("final_accuracy_step")
        said = f"accuracy {accuracy:.3f}" + (f" ({interval})" if interval else "")
        parts.append(said + ("" if when is None else f" at step {when}"))
    if (best := summary.get("best_accuracy")) is not None and best != accuracy:
        parts.append(f"best {best:.3f}")
    seconds = summary.get("train_seconds")
    yield ", ".join(parts) + ("" if seconds is None else f"; {duration(seconds)} of training")
    if folder is None:
        return
    here = Path.cwd()
    place = shlex.quote(plain(folder.relative_to(here) if folder.is_relative_to(here) else folder))
    yield f"the run is in {place}; its completions: grpo show {place}; its curves: grpo report {place}"
    if status != "completed":
        yield f"go on with it: grpo train resume={place}"
