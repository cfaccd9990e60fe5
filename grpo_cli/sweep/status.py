"""The state of a sweep's jobs, from their folders, which are those of runs. Starts none."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_cli.runs.files import read_object
from grpo_cli.runs.layout import LOG, STATUS, SUMMARY
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import duration, plain

TAIL_BYTES = 65536  # of log.txt: the last lines are in them


@dataclass(frozen=True)
class Job:
    """One run of a sweep. `label` is how it differs from the others, `refusal` why it cannot run."""

    number: int
    folder: Path
    overrides: tuple[str, ...]
    label: str
    refusal: str | None = None


@dataclass(frozen=True)
class JobState:
    """`status.json`. `seconds` are the total of all its processes: a resumed job has had several."""

    state: str  # waiting | running | done | failed | skipped
    reason: str | None
    overrides: tuple[str, ...]
    exit_code: int | None = None
    seconds: float | None = None
    command: str = "train"


def read_status(folder: Path) -> JobState | None:
    """Return a job's status; None if it was never listed. UserError if the file is damaged."""
    kept = read_object(folder / STATUS)
    try:
        return JobState(**kept | {"overrides": tuple(kept["overrides"])}) if kept else None
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / STATUS} is not a job's status ({error}); remove it to run the job") from error


def status_line(job: Job, status: JobState) -> str:
    """Return a job's new state in a line; `grpo ls` shows steps and accuracies."""
    parts = [status.state]
    parts += [] if status.seconds is None else [duration(status.seconds)]
    parts += [plain(status.reason)] if status.reason else []
    return f"job {job.number}  {job.label}: {'  '.join(parts)}"


def failure(code: int, folder: Path, logged: int = 0) -> str | None:
    """Return why a process that ended with this code did not complete its run: from its summary, a signal, or the last
    lines of its log, which had `logged` bytes before. None if it did."""
    if code == 0:
        try:
            ended = read_object(folder / SUMMARY).get("status", "completed")
        except UserError as error:
            return str(error)
        return None if ended == "completed" else f"it ended {ended}"
    if code < 0:
        hint = ": often because the machine ran out of memory" if -code == signal.SIGKILL else ""
        return f"killed by signal {-code} ({signal.strsignal(-code)}){hint}"
    text = ""
    with suppress(OSError):  # somebody may have removed the folder
        text = (folder / LOG).read_bytes()[logged:][-TAIL_BYTES:].decode("utf-8", "replace")
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    start = next((i for i in reversed(range(len(lines))) if lines[i].startswith("error: ")), len(lines) - 1)
    return " ".join(lines[start:]).removeprefix("error: ") or f"exit code {code}, and nothing in the log"
