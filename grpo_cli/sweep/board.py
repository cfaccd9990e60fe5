"""The display of a sweep: a live table of its jobs in a terminal, otherwise a line per change."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grpo_cli.report.evaluations import headline
from grpo_cli.runs import layout
from grpo_cli.runs.summary import read_object
from grpo_cli.support import terminal as screen
from grpo_cli.support.formatting import duration
from grpo_cli.sweep.status import Job, JobState, last_record

# With more jobs than lines, those that need attention are shown first.
STYLES = {"running": "cyan", "failed": "red", "skipped": "yellow", "done": "green", "waiting": "dim"}
OTHER_LINES = 6  # of the terminal that are not jobs: frame, heading, counts, prompt


class Board:
    """Shows jobs as they change. `clock` is in seconds."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or screen.console()
        self._clock = clock
        self._jobs: dict[int, tuple[Job, JobState, float]] = {}  # with when it changed
        self._live: Live | None = None

    def start(self) -> None:
        """Begin to show the table, in a terminal."""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self.table, console=self._console, refresh_per_second=2)
            self._live.start()

    def close(self) -> None:
        """Stop, leaving the last table on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def changed(self, job: Job, status: JobState) -> None:
        """Show a job's new state; waiting is shown in the table only."""
        self._jobs[job.number] = (job, status, self._clock())
        if self._live is None and (status.state != "waiting" or status.reason):
            what = "  ".join(filter(None, (status.state, _progress(job, status), _in_a_line(status))))
            self.say(f"job {job.number}  {job.label}: {what}")

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def table(self) -> RenderableType:
        """Return all jobs, or as many as the terminal has lines for, and how many are in each state."""
        counts = Counter(status.state for _, status, _ in self._jobs.values())
        summary = ", ".join(f"{counts[state]} {state}" for state in STYLES if counts[state])
        table = Table(caption=summary, caption_justify="left", box=None, pad_edge=False)
        for name, how in (("job", "right"), ("settings", "left"), ("state", "left"), ("progress", "left")):
            table.add_column(name, justify=how, no_wrap=name == "progress", overflow="fold")  # type: ignore[arg-type]
        table.add_column("time", justify="right")
        table.add_column("reason", overflow="ellipsis", no_wrap=True)
        urgent = sorted(self._jobs.values(), key=lambda row: ([*STYLES].index(row[1].state), row[0].number))
        room = max(1, self._console.height - OTHER_LINES)
        for job, status, since in sorted(urgent[:room], key=lambda row: row[0].number):
            seconds = status.seconds
            if status.state == "running":
                seconds = (seconds or 0.0) + self._clock() - since
            took = "" if seconds is None else duration(seconds)
            state = Text(status.state, style=STYLES[status.state])
            cells = (Text(job.label), state, _progress(job, status), took, Text(_in_a_line(status)))
            table.add_row(str(job.number), *cells)
        return table


def _progress(job: Job, status: JobState) -> str:
    """Return a job's step, reward and accuracy, from its last record; an evaluation's accuracy."""
    if status.state == "done" and status.command == "eval":
        return headline(read_object(job.folder / layout.SUMMARY))
    seen = last_record(job.folder) if status.state in ("running", "done", "failed") else {}
    parts = [f"step {seen['step']}" + (f"/{job.steps}" if job.steps else "")] if seen else []
    for word, name in (("reward", "reward/mean"), ("eval", "eval/accuracy")):
        parts += [f"{word} {float(seen[name]):.3f}"] if name in seen else []
    return "  ".join(parts)


def _in_a_line(status: JobState) -> str:
    return " ".join((status.reason or "").split())
