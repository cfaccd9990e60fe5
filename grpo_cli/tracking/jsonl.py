"""Records as lines of JSON in the run's folder, always; and the tracker that stands for no other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.runs.files import json_line, sync_file, sync_folder
from grpo_cli.runs.layout import METRICS, ROLLOUTS, SUMMARY
from grpo_cli.runs.ledger import Ledger, cut, load_ledgers, look, save_ledgers
from grpo_cli.support.errors import UserError
from grpo_cli.types import Example, Record

Say = Callable[[str], None]
SAID = 8  # damages that are named; of more, how many they are


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
    appears twice; so is a last line that a crash left half written. Those before must be what the ledger of the
    `checkpoint` that it goes on from says, if that is one of this folder. What is not is told in a UserError, or, with
    `accept_damage`, in warnings: then whole lines are kept as they are.
    """

    def __init__(
        self,
        run_dir: Path,
        first_step: int | None = None,
        warn: Say = to_stderr,
        checkpoint: Path | None = None,
        accept_damage: bool = False,
    ) -> None:
        self._warn = warn
        self._lost: dict[str, list[int]] = {}  # steps by what could not be written
        self._paths = {name: run_dir / name for name in (METRICS, ROLLOUTS)}
        self._ledgers = {name: Ledger() for name in self._paths}
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            if first_step is None:
                _refuse_records(self._paths.values())
            else:
                self._go_on(first_step - 1, _in_folder(checkpoint, run_dir), accept_damage)
            for path in self._paths.values():
                _append(path, b"", 0)
            sync_folder(run_dir)
        except OSError as error:
            raise UserError(
                f"the run folder {run_dir} cannot be written ({error.strerror or error}). Choose another with "
                "hydra.run.dir=<folder>, or make it writable."
            ) from error

    def log(self, record: Record) -> None:
        """Write a record, unless its step was written before."""
        self._write(METRICS, record.step, [json_line({"step": record.step, **record.metrics})])
        self._write(ROLLOUTS, record.step, [json_line(_row(record.step, example)) for example in record.examples])

    def keep(self, folder: Path) -> None:
        """Wait until all that was logged is on the disk, and leave the ledger of it in a checkpoint's folder."""
        for path in self._paths.values():
            if path.exists():
                sync_file(path)
        save_ledgers(folder, self._ledgers)

    @property
    def missing(self) -> list[int]:
        """The steps whose records are not, or not all, in the files: the disk was full, or damage was accepted."""
        return sorted({step for ledger in self._ledgers.values() for step in ledger.lost})

    def close(self, summary: Mapping[str, Any]) -> None:
        """Say which rows are lost; nothing is held open between records."""
        for name, steps in self._lost.items():
            self._warn(f"{self._paths[name]} lacks {len(steps)} steps that could not be written: {_listed(steps)}")

    def _write(self, name: str, step: int, lines: Sequence[str]) -> None:
        ledger, data = self._ledgers[name], "".join(f"{line}\n" for line in lines).encode()
        if not lines or step <= ledger.last_step:
            return
        try:
            _append(self._paths[name], data, ledger.size)
            ledger.add(step, data)
        except OSError as error:
            ledger.lose(step)
            if not self._lost:
                self._warn(f"step {step} could not be written to {self._paths[name]}: {error}")
            self._lost.setdefault(name, []).append(step)

    def _go_on(self, last: int, checkpoint: Path | None, accept_damage: bool) -> None:
        """After step `last`."""
        kept = load_ledgers(checkpoint) if checkpoint else {}
        found = {
            name: look(path, last, kept.get(name), every_step=name == METRICS and checkpoint is not None)
            for name, path in self._paths.items()
        }
        problems = [problem for each in found.values() for problem in each.problems]
        some = [*problems[:SAID], *([f"and {len(problems) - SAID} more"] if len(problems) > SAID else [])]
        if problems and not accept_damage:
            raise UserError(
                f"the records in {self._paths[METRICS].parent} are not those that were written: {'; '.join(some)}. Put "
                "back what was there, or go on with what is there now: accept_damage=true"
            )
        for problem in some:
            self._warn(f"damage is accepted, and stays: {problem}")
        # What it says is of rows that are cut now: a kill from here on leaves none.
        (self._paths[METRICS].parent / SUMMARY).unlink(missing_ok=True)
        for name, each in found.items():
            cut(self._paths[name], each)
            self._ledgers[name] = each.ledger


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:SAID])) + (", ..." if len(steps) > SAID else "")


def _in_folder(checkpoint: Path | None, run_dir: Path) -> Path | None:
    """The checkpoint, if it is of the run that this folder is of: only then has it seen the records here."""
    return checkpoint if checkpoint and checkpoint.resolve().parent.parent == run_dir.resolve() else None


def _refuse_records(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists() and path.stat().st_size:
            raise UserError(
                f"{path} already holds the records of a run. Continue that run with resume={path.parent}, or choose "
                "another folder with hydra.run.dir=<folder>."
            )


def _row(step: int, example: Example) -> dict[str, Any]:
    return {"step": step, **example.row()}


def _append(path: Path, data: bytes, size: int) -> None:
    """All of the data, or none: what a full disk cuts short is taken back, and so is what an interrupted call has left
    beyond the `size` bytes that were written."""
    left = memoryview(data)
    with open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if data and end > size:
            end = file.truncate(size)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(end)
            raise
