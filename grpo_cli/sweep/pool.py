"""The jobs of a sweep: what the disk knows of each, and a pool that runs them as processes. Knows nothing of Hydra.

<sweep>/sweep.json           what was asked for, and the list of jobs
<sweep>/<number>/            a run's folder, as if it had been started by hand
<sweep>/<number>/status.json what became of the job (`Status`)
<sweep>/<number>/log.txt     all that it printed; locked as long as it runs
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from grpo_cli.errors import UserError
from grpo_cli.runs.files import json_line, write_atomically
from grpo_cli.runs.summary import read_object

POLL_SECONDS = 0.05
TAIL_BYTES = 65536  # of metrics.jsonl and log.txt: the last lines are in them
COMPLETE = "COMPLETE"  # checkpoint.MARKER, without the torch that checkpoint.py loads


@dataclass(frozen=True)
class Job:
    """One run of a sweep. `label` is what sets it apart, `steps` how many there are, `refusal` why it cannot run."""

    number: int
    folder: Path
    overrides: tuple[str, ...]
    label: str
    steps: int | None = None
    refusal: str | None = None


@dataclass(frozen=True)
class Status:
    """`status.json`. `seconds` are those of all its processes: a job that was resumed has had several."""

    state: str  # waiting | running | done | failed | skipped
    reason: str | None
    overrides: tuple[str, ...]
    exit_code: int | None = None
    started: str | None = None
    seconds: float | None = None
    log: str = "log.txt"
    command: str = "train"


def write_status(folder: Path, status: Status) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "status.json", f"{json_line(asdict(status), indent=2)}\n".encode())


def read_status(folder: Path) -> Status | None:
    """None if the job was never listed."""
    kept = read_object(folder / "status.json")
    if not kept:
        return None
    try:
        known = {field.name: kept[field.name] for field in fields(Status) if field.name in kept}
        return Status(**known | {"overrides": tuple(kept["overrides"])})
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / 'status.json'} is no job's status ({error}); remove it to run the job") from error


def is_done(folder: Path) -> bool:
    """Whether a job's own word or the launcher's is that it has ended well."""
    status = read_status(folder)
    return (status is not None and status.state == "done") or read_object(folder / "summary.json").get(
        "status"
    ) == "completed"


def is_running(folder: Path) -> bool:
    """Whether a process still writes to the job's log, though whoever started it may be gone."""
    try:
        with open(folder / "log.txt", "ab") as log:
            return not _locked(log)
    except FileNotFoundError:
        return False


def resumes_from(folder: Path, steps: int | None) -> Path | None:
    """Where an unfinished run goes on: at its newest checkpoint, None if it has none that was saved to its end.

    A run that was killed after its last step, before it could say so, goes on at the one before, if that was kept.
    """
    saved = [marker.parent for marker in (folder / "checkpoints").glob(f"step_*/{COMPLETE}")]
    found = {int(path.stem.removeprefix("step_")): path for path in saved if path.suffix != ".tmp"}
    if not found:
        return None
    left = [step for step in found if steps is None or step < steps]
    return folder if len(left) == len(found) else found[max(left or found)]


def last_record(folder: Path) -> dict[str, Any]:
    """The last whole line of `metrics.jsonl`, empty if there is none yet."""
    lines = _tail(folder / "metrics.jsonl")[:-1]
    try:
        record = json.loads(lines[-1]) if lines else {}
    except ValueError:  # longer than the tail, or damaged: this is for the screen only
        return {}
    return record if isinstance(record, dict) and "step" in record else {}


def _tail(path: Path) -> list[str]:
    """The last lines; what follows the last line break is a line of its own, mostly empty."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return []


def _locked(log: Any) -> bool:
    """Lock a log for as long as this file, or one inherited from it, is open; False if another process has it."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def failure(code: int, folder: Path) -> str | None:
    """Why a process that ended with this code did not complete its run: the run's own word, a signal, or its last line.
    None if it did."""
    if code == 0:
        try:
            ended = read_object(folder / "summary.json").get("status", "completed")
        except UserError as error:
            return str(error)
        return None if ended == "completed" else f"it ended {ended}"
    if code < 0:
        named = {number.value: number.name for number in signal.Signals}  # most of the real-time ones have no name
        hint = ": often because the machine had no memory left" if -code == signal.SIGKILL else ""
        return f"killed by {named.get(-code, f'signal {-code}')}{hint}"
    said = [line.strip() for line in _tail(folder / "log.txt") if line.strip()]
    start = next((i for i in reversed(range(len(said))) if said[i].startswith("error: ")), len(said) - 1)
    words = " ".join(said[start:]).removeprefix("error: ")
    return words or f"exit code {code}, and no word in the log"


@runtime_checkable
class View(Protocol):
    """Who is told what becomes of the jobs."""

    def changed(self, job: Job, status: Status) -> None: ...

    def say(self, text: str) -> None: ...


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    place: Mapping[str, str]
    status: Status
    began: float


class Pool:
    """Runs jobs as processes, as many at a time as there are places, and keeps their status files.

    A place is what the environment of its processes has besides this one's. A job gets a session of its own, so that
    ctrl-C reaches only this process: the first one (or SIGTERM, or the terminal's end) asks every job to stop after its
    step and waits, the second kills them. A job that outlives this process goes on; its log stays locked.
    """

    def __init__(
        self, places: Sequence[Mapping[str, str]], command_of: Callable[[Job], list[str]], name: str, view: View
    ) -> None:
        self._free = deque(places)
        self._command_of = command_of
        self._name = name
        self._view = view
        self._running: list[_Running] = []
        self._stops = self._told = 0  # how often it was asked to stop, and the jobs were

    @property
    def stopped(self) -> bool:
        return self._stops > 0

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all of them, or those that had begun when it was asked to stop."""
        waiting = deque(jobs)
        with self._signals():
            try:
                while self._running or (waiting and not self._stops):
                    while waiting and self._free and not self._stops:
                        self._start(waiting.popleft())
                    if self._told < self._stops:
                        self._tell_all()
                    time.sleep(POLL_SECONDS)
                    self._settle()
            except BaseException:
                self._stops = 2  # an error of ours must not leave processes behind
                self._tell_all()
                for running in self._running:
                    running.process.wait()
                raise

    def _start(self, job: Job) -> None:
        place = self._free.popleft()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        before = read_status(job.folder)
        status = Status(
            "running",
            None,
            job.overrides,
            started=before.started if before and before.started else now,
            seconds=before.seconds if before else None,
            command=self._name,
        )
        with open(job.folder / "log.txt", "ab") as log:
            if not _locked(log):
                raise UserError(f"job {job.number} is still running, see {job.folder / 'log.txt'}: wait for it first")
            command = self._command_of(job)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **place},
                start_new_session=True,
            )
        self._running.append(_Running(job, process, place, status, time.monotonic()))
        self._set(job, status)

    def _settle(self) -> None:
        for running in [running for running in self._running if running.process.poll() is not None]:
            self._running.remove(running)
            self._free.append(running.place)
            code = running.process.returncode
            seconds = (running.status.seconds or 0.0) + time.monotonic() - running.began
            reason = failure(code, running.job.folder)
            state = "done" if reason is None else "failed"
            if reason is not None and self._stops:
                state, reason = "waiting", "the sweep was stopped while it ran"
            ended = replace(running.status, state=state, reason=reason, exit_code=code, seconds=round(seconds, 3))
            self._set(running.job, ended)

    def _set(self, job: Job, status: Status) -> None:
        write_status(job.folder, status)
        self._view.changed(job, status)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(number: int, frame: Any) -> None:
            self._stops += 1
            if self._stops == 1:
                self._view.say("stopping: each job ends its step and saves; press ctrl-C again to kill them")

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _tell_all(self) -> None:
        """Ask the jobs to stop; the second time, kill them with all that they have started."""
        self._told = self._stops
        for running in self._running:
            if running.process.poll() is None:
                if self._stops == 1:
                    running.process.terminate()
                else:
                    os.killpg(running.process.pid, signal.SIGKILL)
