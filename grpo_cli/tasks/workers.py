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
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
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
    """One process, which is started by the first question."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._command, self._seconds = command, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection

    def ask(self, question: Question) -> Reply:
        """Return its reply; `limit` if its time ran out, `died` with the reason if it ended. Raise UserError if it
        does not start."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        with suppress(ConnectionError):  # it has ended, and so will its replies
            self._pipe.send_bytes(json.dumps(question).encode())
        reply = self._reply(self._seconds)
        if reply == LATE or "died" in reply:
            self.end()
        return reply

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
        if not reply.get("ready"):
            self.end()
            raise UserError(f"the task's worker process did not start: {reply.get('died', 'it took too long')}")

    def _reply(self, seconds: float) -> Reply:
        assert self._process is not None
        try:
            return json.loads(self._pipe.recv_bytes()) if self._pipe.poll(seconds) else LATE
        except (EOFError, ConnectionError):
            code = self._process.wait(timeout=10)
            return {"died": f"signal {-code}" if code < 0 else f"exit code {code}"}


class Workers:
    """A pool of at most `count` processes of a kind, each given at most `seconds` for a question."""

    def __init__(self, kind: str, count: int, seconds: float) -> None:
        # -P: nothing is imported from the folder of the script
        command = [sys.executable, "-P", str(SCRIPT), kind, str(seconds)]
        self._workers = [Worker(command, seconds) for _ in range(count)]
        weakref.finalize(self, _end_own, self._workers, os.getpid())

    def ask(self, questions: Sequence[Question]) -> list[Reply]:
        """Return the reply to each question; see `Worker.ask`."""
        asked = self._workers[: len(questions)]
        free: SimpleQueue[Worker] = SimpleQueue()
        for worker in asked:
            free.put(worker)

        def reply(question: Question) -> Reply:
            worker = free.get()
            try:
                return worker.ask(question)
            finally:
                free.put(worker)

        with ThreadPoolExecutor(max(1, len(asked))) as threads:
            try:
                return list(threads.map(reply, questions))
            except BaseException:
                for worker in asked:
                    worker.kill()  # the threads are waited for
                raise

    def close(self) -> None:
        """End all workers; the next question starts new ones."""
        _end_own(self._workers, os.getpid())


def _end_own(workers: Sequence[Worker], owner: int) -> None:
    """End workers with their object or the program; a fork of the program leaves its parent's workers alone."""
    if os.getpid() == owner:
        for worker in workers:
            worker.end()
