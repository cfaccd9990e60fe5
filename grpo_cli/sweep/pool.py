"""Runs a sweep's jobs as processes, and keeps the state of each on disk. Knows nothing of Hydra.

waiting -> running -> done | failed, or waiting again if it was stopped
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import IO, Any

from grpo_cli.runs import layout
from grpo_cli.runs.files import regular
from grpo_cli.runs.lock import try_lock
from grpo_cli.support.errors import UserError
from grpo_cli.sweep.board import Board
from grpo_cli.sweep.status import Job, JobState, failure, read_status, write_status

POLL_SECONDS = 0.05
STOPPED = "the sweep was stopped while it ran"
# From the terminal, a user, a cluster's warning and its end of a job.
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(eq=False)
class RunningJob:
    """A job's process, in a session of its own, so that ctrl-C reaches only the launcher. Its log stays locked as long
    as it runs, even after the launcher has ended."""

    job: Job
    place: Mapping[str, str]
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    status: JobState
    began: float

    def end(self, number: signal.Signals) -> None:
        """Send SIGTERM for it to finish its step and save, or SIGKILL to it and all its children."""
        if self.process.poll() is None:
            self.process.terminate() if number == signal.SIGTERM else os.killpg(self.process.pid, number)

    def ended(self, stopped: bool) -> JobState:
        """Return its final status. If it was `stopped`, being unfinished is not a failure."""
        self.log.close()
        code = self.process.returncode
        reason = failure(code, self.job.folder)
        state = "done" if reason is None else "failed"
        if reason is not None and stopped:
            state, reason = "waiting", STOPPED
        seconds = round((self.status.seconds or 0.0) + time.monotonic() - self.began, 3)
        return replace(self.status, state=state, reason=reason, exit_code=code, seconds=seconds, pid=None, host=None)


class Pool:
    """Runs jobs as processes, one per place at a time, and updates their status files.

    A place is the environment variables that its processes get in addition. The first ctrl-C (or other of STOPS) lets
    every job stop after its step and waits, the second kills them. A job that outlives this process continues, with
    its log locked.
    """

    def __init__(
        self, places: Sequence[Mapping[str, str]], command_of: Callable[[Job], list[str]], name: str, board: Board
    ) -> None:
        self._free, self._command_of, self._name, self._board = deque(places), command_of, name, board
        self._running: list[RunningJob] = []
        self._stops = self._passed_on = 0  # how often this pool, and its jobs, were stopped

    @property
    def stopped(self) -> bool:
        """True once a signal came."""
        return self._stops > 0

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs, or those that had started when a signal came. On an exception every job saves and exits."""
        waiting = deque(jobs)
        before = {number: signal.getsignal(number) for number in STOPS}
        heard = [number for number, handler in before.items() if handler is not signal.SIG_IGN]  # `nohup` stays
        try:
            for number in heard:
                signal.signal(number, self._stop)
            while self._running or (waiting and not self._stops):
                while waiting and self._free and not self._stops:
                    self._start(waiting.popleft())
                self._settle()
        except BaseException:
            self._stops = max(self._stops, 1)
            self._board = Board()  # the other one may be at fault
            while self._running:
                self._settle()
            raise
        finally:
            for number in heard:
                signal.signal(number, before[number])

    def _start(self, job: Job) -> None:
        """Start the job's process. UserError if an earlier one still runs."""
        before = read_status(job.folder)
        path = job.folder / layout.LOG
        log = open(path, "ab", opener=regular)  # locked here; the job itself locks its folder
        if try_lock(log) is False:
            log.close()
            raise UserError(f"job {job.number} is still running ({runner(before)}), see {path}: wait for it")
        place = self._free.popleft()
        with open(path, "ab", opener=regular) as output:  # no lock goes along with this one
            process = subprocess.Popen(
                self._command_of(job),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **place},
                start_new_session=True,
            )
        status = JobState(
            "running",
            None,
            job.overrides,
            started=(before.started if before else None) or datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=before.seconds if before else None,
            command=self._name,
            pid=process.pid,
            host=platform.node(),
        )
        self._running.append(RunningJob(job, place, process, log, status, time.monotonic()))
        self._note(job, status)

    def _settle(self) -> None:
        """Pass a signal on, wait a little, and note which jobs have ended."""
        if self._passed_on < self._stops:
            self._passed_on = self._stops
            for running in self._running:
                running.end(signal.SIGTERM if self._stops == 1 else signal.SIGKILL)
        time.sleep(POLL_SECONDS)
        for running in [running for running in self._running if running.process.poll() is not None]:
            self._running.remove(running)
            self._free.append(running.place)
            self._note(running.job, running.ended(self.stopped))

    def _note(self, job: Job, status: JobState) -> None:
        write_status(job.folder, status)
        self._board.changed(job, status)

    def _stop(self, number: int, frame: Any) -> None:
        self._stops += 1
        if self._stops == 1:
            self._board.say("stopping: each job finishes its step and saves; press ctrl-C again to kill them")


def runner(status: JobState | None) -> str:
    """Return the process that runs a job."""
    return f"process {status.pid} on {status.host}" if status and status.pid else "another process"
