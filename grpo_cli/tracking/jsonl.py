"""Records as JSON lines in the run's folder, which every run has; and a tracker that sends them nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.runs.files import json_line, must_be_writable, regular, sync_file, sync_folder
from grpo_cli.runs.layout import METRICS, ROLLOUTS, SUMMARY
from grpo_cli.runs.ledger import RecordFile, load_ledgers, save_ledgers
from grpo_cli.support.errors import UserError
from grpo_cli.support.terminal import to_stderr
from grpo_cli.types import Record

Say = Callable[[str], None]
NAMED = 8  # steps listed in a warning


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

    A fresh run (`first_step=None`) refuses a folder that already has records. A resumed one gives the first step that
    it will log: rows of that step and later ones, and a half-written last line, are cut off, so that no step appears
    twice. The rows before must be those that were written when the `checkpoint` was saved, if it is one of this folder;
    if they are not, that is a UserError or, with `accept_damage`, a warning, and whole lines are kept as they are.
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
        self._warned = False  # that a step could not be written
        self._files = {name: RecordFile(run_dir / name) for name in (METRICS, ROLLOUTS)}
        with must_be_writable(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            if first_step is None:
                self._refuse_records()
            else:
                # another run's checkpoint knows nothing of these records
                ours = checkpoint if checkpoint and checkpoint.resolve().parent.parent == run_dir.resolve() else None
                self._go_on(run_dir, first_step - 1, ours, accept_damage)
            for file in self._files.values():
                open(file.path, "ab", opener=regular).close()
            sync_folder(run_dir)

    def log(self, record: Record) -> None:
        """Write a record, unless its step was written before."""
        self._write(METRICS, record.step, [record.metrics])
        self._write(ROLLOUTS, record.step, [example.row() for example in record.examples])

    def keep(self) -> Callable[[Path], None]:
        """A function that syncs all records to disk, and saves the ledger of those of now in a checkpoint's folder."""
        blocks = {name: file.blocks() for name, file in self._files.items()}

        def save(folder: Path) -> None:
            for file in self._files.values():
                if file.path.exists():
                    sync_file(file.path)
            save_ledgers(folder, blocks)

        return save

    @property
    def missing(self) -> list[int]:
        """The steps whose records are missing or incomplete: the disk was full, or damage was accepted."""
        return sorted({step for file in self._files.values() for step in file.lost})

    def close(self, summary: Mapping[str, Any]) -> None:
        """Name the lost steps; no file is open between records."""
        for file in self._files.values():
            if file.lost and self._warned:
                steps = ", ".join(map(str, file.lost[:NAMED])) + ", ..." * (len(file.lost) > NAMED)
                self._warn(f"{file.path} lacks {len(file.lost)} steps: {steps}")

    def _write(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        file = self._files[name]
        if not rows or step <= file.last_step:
            return
        try:
            file.append(step, "".join(f"{json_line({'step': step, **row})}\n" for row in rows).encode())
        except OSError as error:
            if not self._warned:
                self._warn(f"step {step} could not be written to {file.path}: {error}")
            self._warned = True

    def _refuse_records(self) -> None:
        for file in self._files.values():
            if file.path.exists() and file.path.stat().st_size:
                raise UserError(
                    f"{file.path} already holds the records of a run. Continue that run with "
                    f"resume={file.path.parent}, or choose another folder with hydra.run.dir=<folder>."
                )

    def _go_on(self, run_dir: Path, last: int, checkpoint: Path | None, accept_damage: bool) -> None:
        """After step `last`."""
        known = load_ledgers(checkpoint) if checkpoint else {}
        problems = []
        for name, file in self._files.items():
            problems += file.go_on(last, known.get(name), every_step=name == METRICS and checkpoint is not None)
        if problems and not accept_damage:
            raise UserError(
                f"the records in {run_dir} are not those that were written: {'; '.join(problems)}. Restore them, "
                "or continue with what is there: accept_damage=true"
            )
        for problem in problems:
            self._warn(f"accepted damage: {problem}")
        (run_dir / SUMMARY).unlink(missing_ok=True)  # it describes rows that are cut off now
        for file in self._files.values():
            file.cut()
