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
from typing import IO

from grpo_cli.runs import layout
from grpo_cli.runs.files import regular
from grpo_cli.runs.lock import try_lock
from grpo_cli.runs.stop import Stop
from grpo_cli.support.errors import UserError
from grpo_cli.sweep.status import Job, JobState, failure, read_status, status_line, write_status

POLL_SECONDS = 0.05


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

    def ended(self, stopped: bool) -> JobState:
        """Return its final status. If it was `stopped`, being unfinished is not a failure."""
        self.log.close()
        code = self.process.returncode
        reason = failure(code, self.job.folder)
        state = "done" if reason is None else "failed"
        if reason is not None and stopped:
            state, reason = "waiting", "the sweep was stopped while it ran"
        seconds = round((self.status.seconds or 0.0) + time.monotonic() - self.began, 3)
        return replace(self.status, state=state, reason=reason, exit_code=code, seconds=seconds, pid=None, host=None)


class Pool:
    """Runs jobs as processes, one per place at a time, and updates their status files.

    A place is the environment variables that its processes get in addition. The first ctrl-C (or other signal of
    `Stop`) lets every job stop after its step and waits, the second kills them. A job that outlives this process
    continues, with its log locked. `stopped` is true once a signal came.
    """

    def __init__(
        self, places: Sequence[Mapping[str, str]], command_of: Callable[[Job], list[str]], say: Callable[[str], None]
    ) -> None:
        self._free, self._command_of, self._say = deque(places), command_of, say
        self._running: list[RunningJob] = []
        self.stopped = False

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs, or those that had started when a signal came. On an exception every job saves and exits."""
        waiting = deque(jobs)
        with Stop(self._say) as stop:
            try:
                while self._running or (waiting and not stop):
                    while waiting and self._free and not stop:
                        self._start(waiting.popleft())
                    if stop and not self.stopped:
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
        """Start the job's process. UserError if an earlier one still runs."""
        before = read_status(job.folder) or JobState("waiting", None, job.overrides)
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
        status = replace(before, state="running", reason=None, exit_code=None, pid=process.pid, host=platform.node())
        self._running.append(RunningJob(job, place, process, log, status, time.monotonic()))
        self._note(job, status)

    def _end(self, number: signal.Signals) -> None:
        """Send SIGTERM for each job to finish its step and save, or SIGKILL to it and all its children."""
        self.stopped = True
        for running in self._running:
            if running.process.poll() is None:
                running.process.terminate() if number == signal.SIGTERM else os.killpg(running.process.pid, number)

    def _wait(self) -> None:
        """Wait a little, and note which jobs have ended."""
        time.sleep(POLL_SECONDS)
        for running in [running for running in self._running if running.process.poll() is not None]:
            self._running.remove(running)
            self._free.append(running.place)
            self._note(running.job, running.ended(self.stopped))

    def _note(self, job: Job, status: JobState) -> None:
        write_status(job.folder, status)
        self._say(status_line(job, status))


def runner(status: JobState | None) -> str:
    """Return the process that runs a job."""
    return f"process {status.pid} on {status.host}" if status and status.pid else "another process"
