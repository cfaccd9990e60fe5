"""A pool that runs a sweep's jobs as processes, and leaves the truth about each on the disk. Knows nothing of Hydra."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_cli.runs import layout
from grpo_cli.support.errors import UserError
from grpo_cli.sweep.job import POLL_SECONDS, RunningJob, View, handled, start
from grpo_cli.sweep.status import Job, Status, runner, write_status

STOPPED = "the sweep was stopped while it ran"


class Pool:
    """Runs jobs as processes, as many at a time as there are places, and keeps their status files.

    A place is what the environment of its processes has besides this one's. The first ctrl-C (or other of STOPS) asks
    every job to stop after its step and waits, the second kills them. A job that outlives this process goes on; its log
    stays locked.
    """

    def __init__(
        self, places: Sequence[Mapping[str, str]], command_of: Callable[[Job], list[str]], name: str, view: View
    ) -> None:
        self._free = deque(places)
        self._command_of = command_of
        self._name = name
        self._view = view
        self._running: list[tuple[RunningJob, Mapping[str, str]]] = []
        self._stops = self._told = 0  # how often it was asked to stop, and the jobs were

    @property
    def stopped(self) -> bool:
        return self._stops > 0

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all of them, or those that had begun when it was asked to stop."""
        waiting = deque(jobs)
        with handled(self._ask):
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
                for running, _ in self._running:
                    running.process.wait()
                    running.log.close()
                raise

    def _start(self, job: Job) -> None:
        place = self._free.popleft()
        running = start(job, self._command_of, self._name, place)
        if running is None:
            who, log = runner(job.folder), job.folder / layout.LOG
            raise UserError(f"job {job.number} is still running ({who}), see {log}: wait for it first")
        self._running.append((running, place))
        self._set(job, running.status)

    def _settle(self) -> None:
        for running, place in [pair for pair in self._running if pair[0].process.poll() is not None]:
            self._running.remove((running, place))
            self._free.append(place)
            self._set(running.job, running.ended(STOPPED if self._stops else None))

    def _set(self, job: Job, status: Status) -> None:
        write_status(job.folder, status)
        self._view.changed(job, status)

    def _ask(self, number: int, frame: Any) -> None:
        self._stops += 1
        if self._stops == 1:
            self._view.say("stopping: each job ends its step and saves; press ctrl-C again to kill them")

    def _tell_all(self) -> None:
        """Ask the jobs to stop; the second time, kill them with all that they have started."""
        self._told = self._stops
        for running, _ in self._running:
            running.ask() if self._stops == 1 else running.kill()
