"""One job of a sweep as a process of its own, whoever launches it and on whatever machine. Knows nothing of Hydra.

    waiting -> running -> done | failed, or waiting again if it was stopped

A launcher of another program (joblib, submitit, Ray) brings a job to a process of its choice and calls `run_here`
there. That process trains nothing: it starts one that does, as ours does for every job, and waits for it.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import IO, Any, Protocol, runtime_checkable

from grpo_cli.runs import layout
from grpo_cli.sweep.status import Job, Status, failure, is_done, is_running, locked, read_status, write_status

POLL_SECONDS = 0.05
# What a terminal, a person, a cluster's warning and its end of a job send.
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@runtime_checkable
class View(Protocol):
    """Who is told what becomes of the jobs."""

    def changed(self, job: Job, status: Status) -> None: ...

    def say(self, text: str) -> None: ...


@dataclass(eq=False)
class RunningJob:
    """A job's process. Its log stays locked as long as it runs, though whoever started it may be gone.

    It has a session of its own, so that ctrl-C reaches only who started it.
    """

    job: Job
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    status: Status
    began: float

    def ask(self) -> None:
        """Have it end its step, save and end."""
        if self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """With all that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ask it, and wait; kill it if that is interrupted."""
        try:
            self.ask()
            self.process.wait()
        except BaseException:
            self.kill()
            self.process.wait()
            raise

    def ended(self, stopped: str | None) -> Status:
        """What became of it, as it is to be noted; `stopped` says why it may not have completed, if that was asked."""
        self.log.close()
        code = self.process.returncode
        reason = failure(code, self.job.folder)
        state = "done" if reason is None else "failed"
        if reason is not None and stopped:
            state, reason = "waiting", stopped
        seconds = round((self.status.seconds or 0.0) + time.monotonic() - self.began, 3)
        return replace(self.status, state=state, reason=reason, exit_code=code, seconds=seconds, pid=None, host=None)


def start(job: Job, command_of: Callable[[Job], list[str]], name: str, place: Mapping[str, str]) -> RunningJob | None:
    """Start a job's process with its place's environment; None if one still runs that was started before."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    before = read_status(job.folder)
    log = open(job.folder / layout.LOG, "ab")  # where locks are not inherited (NFS), it is this process that holds it
    try:
        if not locked(log):
            log.close()
            return None
        command = command_of(job)
        # Clusters signal all processes of a job: what tells a launcher to requeue would end this one without a save.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **place},
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    except BaseException:
        log.close()
        raise
    status = Status(
        "running",
        None,
        job.overrides,
        started=before.started if before and before.started else now,
        seconds=before.seconds if before else None,
        command=name,
        pid=process.pid,
        host=platform.node(),
    )
    return RunningJob(job, process, log, status, time.monotonic())


def run_here(job: Job, command_of: Callable[[Job], list[str]], name: str, view: View) -> None:
    """Run a job to its end, unless it has come to it; wait for a process that was left behind by one that was killed.

    A signal that asks for the end has the job end its step and save before what the launcher does at it (of submitit's
    own signal: requeue) ends this process; another one meanwhile kills the job.
    """

    def set_to(status: Status) -> None:
        write_status(job.folder, status)
        view.changed(job, status)

    running: RunningJob | None = None
    asked: list[int] = []

    def ask(number: int) -> None:
        asked.append(number)
        if running is not None:
            running.ask()

    with _first(ask):
        while running is None:
            if is_running(job.folder):
                view.say(f"job {job.number} still runs, left behind by a launcher that is gone: waiting for its end")
            while is_running(job.folder):
                time.sleep(POLL_SECONDS)
            status = read_status(job.folder) or Status("waiting", None, job.overrides, command=name)
            if is_done(job.folder):
                return set_to(replace(status, state="done", reason=None, exit_code=0, pid=None, host=None))
            running = start(job, command_of, name, {})
        try:
            set_to(running.status)
            running.process.wait()
        except BaseException:
            asked.append(0)
            running.stop()
            raise
        finally:
            set_to(running.ended("it was stopped while it ran" if asked else None))
    if asked:
        raise SystemExit(128 + asked[0])


@contextmanager
def _first(ask: Callable[[int], None]) -> Iterator[None]:
    """Let signals that ask for the end come to `ask`, then to who had them before: SystemExit where that was nobody."""
    before = {number: signal.getsignal(number) for number in STOPS}

    def told(number: int, frame: Any) -> None:
        ask(number)
        theirs = before[signal.Signals(number)]
        if not callable(theirs):
            raise SystemExit(128 + number)
        theirs(number, frame)

    with handled(told):
        yield


@contextmanager
def handled(told: Callable[[int, Any], None]) -> Iterator[None]:
    """Let `told` be called at signals that ask for the end; those that are ignored (`nohup`) stay so."""
    all_before = {number: signal.getsignal(number) for number in STOPS}
    before = {number: handler for number, handler in all_before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, told)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
