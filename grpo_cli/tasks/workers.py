"""Questions to programs that may hang: a few processes, each killed when its time is up, on pipes of JSON objects.

No process pool of a library (`pebble`, `concurrent.futures`): those unpickle what a worker replies, and this worker
computes with text that a model wrote. Processes are started when first needed, kept, and started again after a kill.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from grpo_cli.support.errors import UserError

SCRIPT = Path(__file__).with_name("worker.py")
START_SECONDS = 120.0  # imports, on a machine that may be busy
LATE = {"limit": "time"}
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}  # some problems follow from hashes

JudgeWorkers = Annotated[int, Field(ge=1, le=256)]
Question = Mapping[str, Any]
Reply = dict[str, Any]


class Worker:
    """A process, which a question starts if it is not there."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection

    def ask(self, question: Question, seconds: float) -> Reply:
        """Return its reply; `limit` if its time ran out, `died` with the reason if it ended. Raise UserError if it
        does not start."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        return self._reply(seconds, question)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Kill and reap it, if it is there."""
        self.kill()
        if self._process is not None:
            self._process.wait()
            self._pipe.close()
        self._process = None

    def _start(self) -> None:
        self.end()
        self._pipe, there = Pipe()
        with there:
            # A session of its own: ctrl-C at the terminal is for the program that asks, which ends its workers itself.
            self._process = subprocess.Popen(
                [*self._command, str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **_ENVIRONMENT},
            )
        reply = self._reply(START_SECONDS)
        if "ready" not in reply:
            raise UserError(f"the task's worker process did not start: {reply.get('died', 'it took too long')}")

    def _reply(self, seconds: float, question: Question | None = None) -> Reply:
        assert self._process is not None
        try:
            if question is not None:
                self._pipe.send_bytes(json.dumps(question).encode())
            reply = json.loads(self._pipe.recv_bytes()) if self._pipe.poll(seconds) else LATE
        except (EOFError, ConnectionError):
            reply = {"died": f"exit code {self._process.wait(timeout=10)}"}
        if "limit" in reply or "died" in reply:  # one that is out of memory would stay so
            self.end()
        return reply


class Workers:
    """A pool of at most `count` processes of a kind, each given at most `seconds` for a question."""

    def __init__(self, kind: str, count: int, seconds: float) -> None:
        # -P: nothing is imported from the folder of the script
        command = [sys.executable, "-P", str(SCRIPT), kind, str(seconds)]
        self._workers, self._seconds = [Worker(command) for _ in range(count)], seconds
        self._free = [*self._workers]  # the last one that replied is the next to ask, so no more start than are needed
        weakref.finalize(self, _end_own, self._workers, os.getpid())

    def ask(self, questions: Sequence[Question]) -> list[Reply]:
        """Return the reply to each question; see `Worker.ask`."""
        with ThreadPoolExecutor(len(self._workers)) as threads:
            try:
                return list(threads.map(self._reply, questions))
            except BaseException:
                for worker in self._workers:
                    worker.kill()  # the threads are waited for
                raise

    def _reply(self, question: Question) -> Reply:
        worker = self._free.pop()
        try:
            return worker.ask(question, self._seconds)
        finally:
            self._free.append(worker)


def _end_own(workers: Sequence[Worker], owner: int) -> None:
    """End workers with their object or the program; a fork of the program leaves its parent's workers alone."""
    if os.getpid() == owner:
        for worker in workers:
            worker.end()
