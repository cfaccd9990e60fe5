"""Runs a sweep's jobs as processes, and keeps the state of each on disk. Knows nothing of Hydra.

waiting -> running -> done | failed, or waiting again if it was stopped
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from grpo_cli.runs.files import read_object, write_object
from grpo_cli.runs.layout import LOG, STATUS, SUMMARY
from grpo_cli.runs.stop import Stop
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import duration, plain

POLL_SECONDS = 0.05
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


@dataclass(eq=False)
class RunningJob:
    """A job's process, in a session of its own, so that ctrl-C reaches only the launcher."""

    job: Job
    place: Mapping[str, str]
    process: subprocess.Popen[bytes]
    began: float
    logged: int  # bytes that its log had before


class Pool:
    """Jobs as processes, one per place at a time, with their `states` and status files.

    A place is the environment variables that its processes get in addition. The first ctrl-C (or other signal of
    `Stop`) lets every job stop after its step and waits, the second kills them. A job that outlives this process
    continues, with its folder locked. `stopped` is true once a signal came.
    """

    def __init__(
        self, places: Sequence[Mapping[str, str]], command_of: Callable[[Job], list[str]], say: Callable[[str], None]
    ) -> None:
        self._free, self._command_of, self._say = deque(places), command_of, say
        self._running: list[RunningJob] = []
        self.states: dict[Job, JobState] = {}
        self.stopped = False

    def run(self, states: Mapping[Job, JobState]) -> None:
        """Run the waiting jobs, or those that had started when a signal came. On an exception every job saves and
        exits."""
        for job, status in states.items():
            self._note(job, status)
        waiting = deque(job for job, status in states.items() if status.state == "waiting")
        with Stop(self._say) as stop:
            try:
                while self._running or (waiting and not stop.stopped_by):
                    while waiting and self._free and not stop.stopped_by:
                        self._start(waiting.popleft())
                    if stop.stopped_by and not self.stopped:
                        self._end(signal.SIGTERM)
                    self._wait()
            except KeyboardInterrupt:  # the second signal
                self._end(signal.SIGKILL)
            except BaseException:
                self._end(signal.SIGTERM)
                raise
            finally:
                while self._running:
                    self._wait()

    def _start(self, job: Job) -> None:
        place = self._free.popleft()
        with open(job.folder / LOG, "ab") as log:
            logged = log.tell()
            process = subprocess.Popen(
                self._command_of(job),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **place},
                start_new_session=True,
            )
        self._running.append(RunningJob(job, place, process, time.monotonic(), logged))
        self._note(job, replace(self.states[job], state="running", reason=None, exit_code=None))

    def _end(self, number: signal.Signals) -> None:
        """Send SIGTERM for each job to finish its step and save, or SIGKILL to it and all its children."""
        self.stopped = True
        for running in self._running:
            if running.process.poll() is None:
                running.process.terminate() if number == signal.SIGTERM else os.killpg(running.process.pid, number)

    def _wait(self) -> None:
        """Wait a little, and note which jobs have ended. If the sweep was stopped, being unfinished is no failure."""
        time.sleep(POLL_SECONDS)
        for one in [running for running in self._running if running.process.poll() is not None]:
            self._running.remove(one)
            self._free.append(one.place)
            before, code = self.states[one.job], one.process.returncode
            reason = failure(code, one.job.folder, one.logged)
            state = "done" if reason is None else "failed"
            if reason is not None and self.stopped:
                state, reason = "waiting", "the sweep was stopped while it ran"
            seconds = round((before.seconds or 0.0) + time.monotonic() - one.began, 3)
            self._note(one.job, replace(before, state=state, reason=reason, exit_code=code, seconds=seconds))

    def _note(self, job: Job, status: JobState) -> None:
        self.states[job] = status
        write_object(job.folder / STATUS, asdict(status))
        if status.state != "waiting" or status.reason:
            seconds = [] if status.seconds is None else [duration(status.seconds)]
            reason = [plain(status.reason)] if status.reason else []
            # `grpo ls` shows steps and accuracies
            self._say(f"job {job.number}  {job.label}: {'  '.join([status.state, *seconds, *reason])}")


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
