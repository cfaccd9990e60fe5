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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import IO, Any

from grpo_cli.runs import layout
from grpo_cli.runs.files import regular
from grpo_cli.runs.lock import try_lock
from grpo_cli.support.errors import UserError
from grpo_cli.sweep.board import Board
from grpo_cli.sweep.status import Job, Status, failure, read_status, runner, write_status

POLL_SECONDS = 0.05
STOPPED = "the sweep was stopped while it ran"
# From the terminal, a user, a cluster's warning and its end of a job.
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(eq=False)
class RunningJob:
    """A job's process. Its log stays locked as long as it runs, even after the launcher has ended.

    It has a session of its own, so that ctrl-C reaches only the launcher.
    """

    job: Job
    place: Mapping[str, str]
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    status: Status
    began: float

    def ask(self) -> None:
        """Ask it to finish its step, save and exit."""
        if self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """Kill it and all its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def ended(self, stopped: bool) -> Status:
        """Its final status. If it was `stopped`, being unfinished is not a failure."""
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

    A place is the environment variables that its processes get in addition. The first ctrl-C (or other of STOPS) asks
    every job to stop after its step and waits, the second kills them. A job that outlives this process continues, with
    its log locked.
    """

    def __init__(
        self, places: Sequence[Mapping[str, str]], command_of: Callable[[Job], list[str]], name: str, board: Board
    ) -> None:
        self._free = deque(places)
        self._command_of = command_of
        self._name = name
        self._board = board
        self._running: list[RunningJob] = []
        self._stops = self._passed_on = 0  # how often this pool, and its jobs, were asked to stop

    @property
    def stopped(self) -> bool:
        return self._stops > 0

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs, or those that had started when a stop was requested. On an exception (such as one raised by a
        cluster's signal handler) every job saves and exits first."""
        waiting = deque(jobs)
        with handled(self._ask):
            try:
                while self._running or (waiting and not self._stops):
                    while waiting and self._free and not self._stops:
                        with _signals_held():
                            self._start(waiting.popleft())
                    if self._passed_on < self._stops:
                        self._stop_all()
                    time.sleep(POLL_SECONDS)
                    self._settle()
            except BaseException:
                self._end_all()
                raise

    def _start(self, job: Job) -> None:
        """Start the job's process. UserError if an earlier one still runs."""
        before = read_status(job.folder)
        log = open(job.folder / layout.LOG, "ab", opener=regular)  # locked here; the job itself locks its folder
        try:
            if try_lock(log) is False:
                where = job.folder / layout.LOG
                raise UserError(f"job {job.number} is still running ({runner(job.folder)}), see {where}: wait for it")
            command, place = self._command_of(job), self._free.popleft()
            with open(job.folder / layout.LOG, "ab", opener=regular) as output:  # no lock goes along with this one
                process = _started(command, output, place)
        except BaseException:
            log.close()
            raise
        status = Status(
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
        for running in [running for running in self._running if running.process.poll() is not None]:
            self._note(running.job, running.ended(self.stopped))
            self._running.remove(running)
            self._free.append(running.place)

    def _note(self, job: Job, status: Status) -> None:
        write_status(job.folder, status)
        self._board.changed(job, status)

    def _ask(self, number: int, frame: Any) -> None:
        self._stops += 1
        if self._stops == 1:
            self._board.say("stopping: each job finishes its step and saves; press ctrl-C again to kill them")

    def _stop_all(self) -> None:
        """Ask the jobs to stop; the second time, kill them and their children."""
        self._passed_on = self._stops
        for running in self._running:
            running.ask() if self._stops == 1 else running.kill()

    def _end_all(self) -> None:
        """Leave no process behind: ask each to stop, and kill them if another signal arrives."""
        stops = self._stops
        try:
            for running in self._running:
                running.ask()
            while self._stops == stops and any(running.process.poll() is None for running in self._running):
                time.sleep(POLL_SECONDS)
        finally:
            for running in self._running:
                running.kill()
                running.process.wait()
                write_status(running.job.folder, running.ended(stopped=True))


def _started(command: Sequence[str], log: IO[bytes], place: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # Clusters signal all processes of a job: the one that tells a launcher to requeue would kill this one unsaved.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **place},
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals wait until the end. A handler may raise, as those do that requeue a job, and a process that was started
    but is not in the pool's list yet would be asked by nobody to save."""
    before = {number: signal.getsignal(number) for number in (*STOPS, signal.SIGUSR2)}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}
    arrived = list[int]()
    for number in handlers:  # not blocked, which the process would inherit
        signal.signal(number, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for raised in arrived:
            signal.raise_signal(raised)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # the handlers are called here


@contextmanager
def handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` on the signals in STOPS, then the previous handler, which another launcher may use to requeue its
    job. Signals that are ignored (`nohup`) stay ignored."""
    all_before = {number: signal.getsignal(number) for number in STOPS}
    before = {number: known for number, known in all_before.items() if known not in (signal.SIG_IGN, None)}

    def both(number: int, frame: Any) -> None:
        handler(number, frame)
        theirs = before[signal.Signals(number)]
        if callable(theirs) and theirs is not signal.default_int_handler:
            theirs(number, frame)

    try:
        for number in before:
            signal.signal(number, both)
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, known)
