"""Records as lines of JSON in the run's folder, always; and the tracker that stands for no other."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from grpo_cli.errors import UserError
from grpo_cli.runs.files import json_line, sync_folder
from grpo_cli.runs.layout import METRICS, ROLLOUTS
from grpo_cli.types import Example, Record

Say = Callable[[str], None]


def to_stderr(text: str) -> None:
    """How a tracker speaks when nobody gave it a console."""
    print(text, file=sys.stderr)


class NoTracker:
    """Sends records nowhere."""

    def log(self, record: Record) -> None:
        pass

    def close(self, summary: Mapping[str, Any]) -> None:
        pass


class JsonlTracker:
    """`metrics.jsonl`, one object per step, and `rollouts.jsonl`, one object per example; both begin with the step.

    Every record is handed to the operating system as whole lines before `log` returns, so a killed process loses
    nothing. Non-finite numbers are the strings "NaN", "Infinity" and "-Infinity" (see `files.json_line`).

    A fresh run (`first_step=None`) refuses a folder that already has records. A resumed one says the first step it will
    log: rows of that step and later ones, written by the process that is being resumed, are cut off, so that no step
    appears twice; so is a last line that a crash left half written.
    """

    def __init__(self, run_dir: Path, first_step: int | None = None, warn: Say = to_stderr) -> None:
        self._warn = warn
        self._warned = False
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._metrics, self._rollouts = run_dir / METRICS, run_dir / ROLLOUTS
            for path in (self._metrics, self._rollouts):
                _prepare(path, first_step)
                _append(path, [])
        except OSError as error:
            raise UserError(
                f"the run folder {run_dir} cannot be written ({error.strerror or error}). Choose another with "
                "hydra.run.dir=<folder>, or make it writable."
            ) from error

    def log(self, record: Record) -> None:
        try:
            _append(self._metrics, [json_line({"step": record.step, **record.metrics})])
            _append(self._rollouts, [json_line(_row(record.step, example)) for example in record.examples])
        except OSError as error:
            if not self._warned:
                self._warn(f"step {record.step} could not be written to {METRICS} and {ROLLOUTS}: {error}")
            self._warned = True

    def close(self, summary: Mapping[str, Any]) -> None:
        pass  # nothing is held open between records


def _row(step: int, example: Example) -> dict[str, Any]:
    return {"step": step, **{field.name: getattr(example, field.name) for field in fields(example)}}


def _append(path: Path, lines: Sequence[str]) -> None:
    """All of the lines, or none: what a full disk cuts short is taken back."""
    data = memoryview("".join(f"{line}\n" for line in lines).encode())
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise


def _prepare(path: Path, first_step: int | None) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    if first_step is None:
        raise UserError(
            f"{path} already holds the records of a run. Continue that run with resume={path.parent}, or choose "
            "another folder with hydra.run.dir=<folder>."
        )
    temporary = path.with_name(f".{path.name}.tmp")
    with open(path, "rb") as old, open(temporary, "wb") as new:
        for number, line in enumerate(old, start=1):
            if line.endswith(b"\n") and _step_of(path, number, line) < first_step:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def _step_of(path: Path, number: int, line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}, line {number}: no record ({error}). Repair or remove that line to resume.") from error
