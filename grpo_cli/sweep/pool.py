"""A pool that runs a sweep's jobs as processes, and leaves the truth about each on the disk. Knows nothing of Hydra."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

from grpo_cli.errors import UserError
from grpo_cli.runs import layout
from grpo_cli.sweep.status import Job, Status, failure, locked, read_status, write_status

POLL_SECONDS = 0.05


@runtime_checkable
class View(Protocol):
    """Who is told what becomes of the jobs."""

    def changed(self, job: Job, status: Status) -> None: ...

    def say(self, text: str) -> None: ...


@dataclass
class _RunningJob:
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
        self._running: list[_RunningJob] = []
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
        with open(job.folder / layout.LOG, "ab") as log:
            if not locked(log):
                raise UserError(f"job {job.number} is still running, see {job.folder / layout.LOG}: wait for it first")
            command = self._command_of(job)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **place},
                start_new_session=True,
            )
        self._running.append(_RunningJob(job, process, place, status, time.monotonic()))
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
