"""The display of a sweep: a live table of its jobs in a terminal, otherwise a line per change."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grpo_cli.report.evaluations import headline
from grpo_cli.runs import layout
from grpo_cli.runs.summary import read_object
from grpo_cli.support import terminal as screen
from grpo_cli.support.formatting import duration
from grpo_cli.sweep.status import Job, Status, last_record

STYLES = {"waiting": "dim", "running": "cyan", "done": "green", "failed": "red", "skipped": "yellow"}
# With more jobs than lines, those that need attention are shown first.
URGENCY = ("running", "failed", "skipped", "done", "waiting")
OTHER_LINES = 6  # of the terminal that are not jobs: frame, heading, counts, prompt


class Board:
    """Shows jobs as they change. `clock` is in seconds."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or screen.console()
        self._clock = clock
        self._jobs: dict[int, tuple[Job, Status]] = {}
        self._since: dict[int, float] = {}
        self._accuracy: dict[int, float] = {}
        self._live: Live | None = None

    def start(self) -> None:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self.table, console=self._console, refresh_per_second=2)
            self._live.start()

    def close(self) -> None:
        """Stop, leaving the last table on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def changed(self, job: Job, status: Status) -> None:
        """Show a job's new state; waiting is shown in the table only."""
        self._jobs[job.number] = (job, status)
        self._since[job.number] = self._clock()
        if self._live is None and (status.state != "waiting" or status.reason):
            what = "  ".join(filter(None, (status.state, self._progress(job, status), _in_a_line(status))))
            self.say(f"job {job.number}  {job.label}: {what}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def table(self) -> RenderableType:
        """All jobs, or as many as the terminal has lines for, and how many are in each state."""
        counts = Counter(status.state for _, status in self._jobs.values())
        summary = ", ".join(f"{counts[state]} {state}" for state in STYLES if counts[state])
        table = Table(caption=summary, caption_justify="left", box=None, pad_edge=False)
        table.add_column("job", justify="right")
        table.add_column("settings", overflow="fold")
        table.add_column("state")
        table.add_column("progress", no_wrap=True)
        table.add_column("time", justify="right")
        table.add_column("reason", overflow="ellipsis", no_wrap=True)
        for job, status in self._shown():
            state = Text(status.state, style=STYLES[status.state])
            seconds = self._seconds(job, status)
            took = "" if seconds is None else duration(seconds)
            cells = (Text(job.label), state, self._progress(job, status), took, Text(_in_a_line(status)))
            table.add_row(str(job.number), *cells)
        return table

    def _shown(self) -> Sequence[tuple[Job, Status]]:
        jobs = sorted(self._jobs.values(), key=lambda pair: (URGENCY.index(pair[1].state), pair[0].number))
        return sorted(jobs[: max(1, self._console.height - OTHER_LINES)], key=lambda pair: pair[0].number)

    def _seconds(self, job: Job, status: Status) -> float | None:
        if status.state == "running":
            return (status.seconds or 0.0) + self._clock() - self._since[job.number]
        return status.seconds

    def _progress(self, job: Job, status: Status) -> str:
        """Its step, reward and accuracy, from its last record; an evaluation's accuracy."""
        if status.state == "done" and status.command == "eval":
            return headline(read_object(job.folder / layout.SUMMARY))
        seen = last_record(job.folder) if status.state in ("running", "done", "failed") else {}
        if not seen:
            return ""
        if "eval/accuracy" in seen:  # not every record has one
            self._accuracy[job.number] = float(seen["eval/accuracy"])
        parts = [f"step {seen['step']}" + (f"/{job.steps}" if job.steps else "")]
        parts += [f"reward {float(seen['reward/mean']):.3f}"] if "reward/mean" in seen else []
        accuracy = self._accuracy.get(job.number)
        return "  ".join(parts + ([f"eval {accuracy:.3f}"] if accuracy is not None else []))


def _in_a_line(status: Status) -> str:
    return " ".join((status.reason or "").split())
