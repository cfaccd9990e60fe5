"""Questions to programs that may hang: a few processes of one's own, each killed when its time is up.

Started once and kept, since a start costs many questions; started anew after a kill. They share nothing with this
process but a pipe that carries JSON lines, so threads, CUDA and open files here do not matter, and nothing they say is
unpickled. Each is reaped when killed, and all are when this object goes or the program ends.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 120.0  # for a start: it is imports, on a machine that may be busy


class WorkerDied(Exception):
    """A worker ended by itself, or said what is no answer. `question` is the place of what it was asked, if any."""

    def __init__(self, question: int | None, reason: str) -> None:
        super().__init__(reason)
        self.question = question
        self.reason = reason


class Worker:
    """One process, and what it is busy with: `question` is None while it starts or waits."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()
        # A session of its own: ctrl-C at the terminal is for the program that asks, which ends its workers itself.
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._said = b""
        self.ready = False
        self.question: int | None = None
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def replies(self) -> Any:
        """Where it can be heard, for a selector."""
        return self._process.stdout

    @property
    def gone(self) -> bool:
        """Whether it ended without having been asked anything."""
        return self.ready and self.question is None and self._process.poll() is not None

    def ask(self, place: int, question: Mapping[str, Any], seconds: float) -> None:
        self.question, self.deadline = place, time.monotonic() + seconds
        assert self._process.stdin is not None, "it was opened with a pipe"
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError as error:
            raise WorkerDied(place, self._last_words()) from error

    def hear(self) -> dict[str, Any] | None:
        """The reply, once its line is complete."""
        said = os.read(self.replies.fileno(), 65536)
        self._said += said
        if not said:
            raise WorkerDied(self.question, self._last_words())
        if not self._said.endswith(b"\n"):
            return None
        line, self._said = self._said, b""
        reply = json.loads(line)
        assert isinstance(reply, dict), "a worker answers with an object"
        return reply

    def end(self) -> None:
        """Kill and reap it. May be called twice."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None, "it was opened with pipes"
            stream.close()

    def _last_words(self) -> str:
        """How it ended, and the last line that it wrote about it."""
        code = self._process.wait(timeout=10)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{f'signal {-code}' if code < 0 else f'exit code {code}'}{f' ({said[:300]})' if said else ''}"


class Workers:
    """`count` processes that run `script`, each given at most `seconds` for a question."""

    def __init__(self, script: Path, count: int, seconds: float) -> None:
        # -P: the folder of the script is no place to import from
        self._command = [sys.executable, "-P", str(script), str(seconds)]
        self._count = count
        self._seconds = seconds
        self._workers: list[Worker] = []
        weakref.finalize(self, _end_own, self._workers, os.getpid())

    def ask(self, questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
        """The reply to each question, None for one whose time ran out. Raises WorkerDied."""
        replies: list[dict[str, Any] | None] = [None] * len(questions)
        waiting = deque(range(len(questions)))
        try:
            while waiting or any(worker.question is not None for worker in self._workers):
                self._hand_out(questions, waiting)
                self._collect(replies)
        except BaseException:
            _end(self._workers)  # what they still have to say answers questions that nobody asks any more
            raise
        return replies

    def _hand_out(self, questions: Sequence[Mapping[str, Any]], waiting: deque[int]) -> None:
        for worker in [worker for worker in self._workers if worker.gone]:  # while it waited: nobody's question did it
            worker.end()
            self._workers.remove(worker)
        while len(self._workers) < min(self._count, len(questions)):
            self._workers.append(Worker(self._command))
        for worker in self._workers:
            if waiting and worker.ready and worker.question is None:
                place = waiting.popleft()
                worker.ask(place, questions[place], self._seconds)

    def _collect(self, replies: list[dict[str, Any] | None]) -> None:
        """Wait until somebody replies or runs out of time, and note what has become of each."""
        busy = [worker for worker in self._workers if not worker.ready or worker.question is not None]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            soonest = min(worker.deadline for worker in busy)
            heard = [key.data for key, _ in selector.select(max(0.0, soonest - time.monotonic()))]
        for worker in heard:
            reply = worker.hear()
            if reply is not None:
                if worker.ready:
                    replies[worker.question] = reply
                worker.ready, worker.question = True, None
        for worker in busy:
            if time.monotonic() >= worker.deadline and not (worker.ready and worker.question is None):
                if not worker.ready:
                    raise WorkerDied(None, f"it had not started after {START_SECONDS:g} seconds")
                worker.end()
                self._workers[self._workers.index(worker)] = Worker(self._command)  # it starts while others work

    def close(self) -> None:
        """End all workers; the next question starts new ones."""
        _end(self._workers)


def _end(workers: list[Worker]) -> None:
    while workers:
        workers.pop().end()


def _end_own(workers: list[Worker], owner: int) -> None:
    """At the end of this object or of the program; a fork of the program leaves its parent's workers alone."""
    if os.getpid() == owner:
        _end(workers)
