"""Records as JSON lines in the run's folder, which every run has; and a tracker that sends them nowhere else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.interfaces import Tracker
from grpo_cli.runs.files import content, json_line, must_be_writable, regular, sync
from grpo_cli.runs.layout import METRICS, ROLLOUTS
from grpo_cli.support.errors import UserError
from grpo_cli.support.terminal import to_stderr
from grpo_cli.types import Record

Say = Callable[[str], None]
_PIECE = 2**20  # bytes of a file that are read at once


class NoTracker:
    """No tracker."""

    def log(self, record: Record) -> None:
        pass

    def close(self, summary: Mapping[str, Any]) -> None:
        pass


class JsonlTracker(Tracker):
    """`metrics.jsonl`, one object per step, and `rollouts.jsonl`, one object per example; both begin with the step.

    Records are in the files before `log` returns, so a killed process loses nothing. A checkpoint keeps the length and
    the SHA-256 of each file; a resumed run cuts off what came later, and refuses a file that begins with anything else,
    or keeps the whole lines of that length with `accept_damage`. A fresh run refuses a folder that has records.
    """

    def __init__(
        self, run_dir: Path, resumed: bool = False, accept_damage: bool = False, warn: Say = to_stderr
    ) -> None:
        self._accept_damage, self._warn = accept_damage, warn
        self._files = {run_dir / name: (0, hashlib.sha256()) for name in (METRICS, ROLLOUTS)}
        for path in self._files:
            with must_be_writable(path):
                run_dir.mkdir(parents=True, exist_ok=True)
                open(path, "ab", opener=regular).close()
            if not resumed and path.stat().st_size:
                raise UserError(f"{path} already holds the records of a run: give resume={run_dir} or hydra.run.dir=")

    def log(self, record: Record) -> None:
        """Write a record. UserError if there is no room."""
        metrics, rollouts = self._files
        self._append(metrics, record.step, [record.metrics])
        self._append(rollouts, record.step, [example.row() for example in record.examples])

    def _append(self, path: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        data = "".join(f"{json_line({'step': step, **row})}\n" for row in rows).encode()
        size, digest = self._files[path]
        with must_be_writable(path), open(path, "ab", opener=regular) as file:
            if file.tell() > size:
                file.truncate(size)
            file.write(data)
        digest.update(data)
        self._files[path] = size + len(data), digest

    def state_dict(self) -> dict[str, Any]:
        """Return each file's length and SHA-256, once they are on disk."""
        for path in self._files:
            sync(path)
        sync(path.parent)
        return {path.name: [n, digest.hexdigest()] for path, (n, digest) in self._files.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check the files; the next record replaces what was logged after the state, without one (empty) everything."""
        found = {}
        for path in self._files:
            size, expected = state.get(path.name, [0, hashlib.sha256().hexdigest()])
            found[path] = _prefix(path, size)
            if [found[path][0], found[path][1].hexdigest()] == [size, expected]:
                continue
            problem = f"{path} is not as it was when the checkpoint was saved"
            if not self._accept_damage:
                raise UserError(f"{problem}; restore it, or continue with what is there: accept_damage=true")
            self._warn(f"accepted damage: {problem}")
            found[path] = _prefix(path, content(path)[:size].rfind(b"\n") + 1)
        self._files = found


def _prefix(path: Path, size: int) -> tuple[int, Any]:
    """Return the length of the first `size` bytes of a file, as far as there are so many, and their SHA-256."""
    read, digest = 0, hashlib.sha256()
    with open(path, "rb", opener=regular) as file:
        while piece := file.read(min(size - read, _PIECE)):
            digest.update(piece)
            read += len(piece)
    return read, digest
