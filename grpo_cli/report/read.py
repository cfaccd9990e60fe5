"""Reads run folders into frozen records: a run's settings, how it ended, and its curve. Compares nothing.

The files are untrusted: nothing in them is executed, and a file that is damaged or half written becomes a note on its
run.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from grpo_cli.report.curves import GREEDY, SERIES, Curve, curve_of
from grpo_cli.report.recorded_settings import RecordedSettings, settings_of_overrides, settings_of_record
from grpo_cli.runs import layout
from grpo_cli.runs.files import read_object, regular
from grpo_cli.runs.lock import is_held
from grpo_cli.runs.record import read_record
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import is_a, plain

A_RUN_HAS = (layout.METRICS, layout.SUMMARY, layout.STATUS, layout.RUN)
_NOT_BELOW = {layout.CHECKPOINTS, layout.WANDB, layout.TENSORBOARD, layout.BAD_BATCHES}
Row = TypeVar("Row")
_NO_RECORD = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_AN_ACCURACY = re.compile(r"eval/(accuracy|pass@[1-9][0-9]*)")


class State(StrEnum):
    """The state of a run: how it ended, or that it is still running."""

    COMPLETED = "completed"
    RUNNING = "running"
    WAITING = "waiting"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNFINISHED = "unfinished"  # without a summary: it was killed
    REPEATED = "repeated"  # completed, and so did a later run of the same settings and seed


@dataclass(frozen=True)
class Run:
    """One run as read from its folder. Missing numbers are None.

    `curve` is of the requested accuracy, `accuracies` names those that the run has measured. `notes` say what
    could not be read, and what a resumed run has changed.
    """

    folder: Path
    name: str
    state: State
    reason: str
    recorded: RecordedSettings
    curve: Curve
    accuracies: tuple[str, ...] = ()
    steps: int = 0
    seconds: float | None = None
    generated_tokens: float | None = None
    trained_tokens: float | None = None
    peak_bytes: float | None = None
    code: Mapping[str, str] = field(default_factory=dict)  # versions of the code, by package
    notes: tuple[str, ...] = ()
    series: Mapping[str, Curve] = field(default_factory=dict)  # of the metrics of `SERIES`
    began: str = ""  # UTC, in ISO form

    @property
    def final_accuracy(self) -> float | None:
        return self.curve.values[-1] if self.curve.values else None


def read_all(folders: Sequence[Path], metric: str = GREEDY) -> list[Run]:
    """Return every run in or below the folders, each once, in the order of the folders and of their jobs' numbers;
    may be empty. `metric` is the accuracy to read. UserError if a folder does not exist."""
    found: dict[Path, tuple[str, Sequence[str]]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{plain(folder)} is not a folder: name run folders, sweep folders, or what holds them")
        try:
            for path, job in _run_folders(folder):
                # relative to the given folder; with the latter's own name if several were given
                whole = path == folder or len(folders) > 1
                below = path.relative_to(folder)
                found.setdefault(path.resolve(), (plain(folder.resolve().name / below if whole else below), job))
        except OSError as error:
            raise UserError(f"{plain(error.filename)} cannot be read: {error.strerror}") from error
    return [read_run(path, name, job, metric) for path, (name, job) in found.items()]


def _run_folders(folder: Path) -> Iterator[tuple[Path, Sequence[str]]]:
    """Yield run folders in or below `folder`; the jobs of a sweep in order, including those without a folder yet."""
    if any((folder / name).is_file() for name in A_RUN_HAS):
        yield folder, ()
        return
    jobs = jobs_of(folder)
    yield from jobs.items()
    names = (entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    for name in sorted(names, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name)):
        if name not in _NOT_BELOW and not name.startswith(".") and folder / name not in jobs:
            yield from _run_folders(folder / name)


def jobs_of(sweep: Path) -> dict[Path, Sequence[str]]:
    """Return the jobs that a sweep's launcher listed, folder to overrides; empty for any other folder."""
    jobs: dict[Path, Sequence[str]] = {}
    listed = _object(sweep / layout.SWEEP, []).get("jobs")
    for job in listed if isinstance(listed, list) else []:
        place = Path(str(job.get("folder", ""))) if isinstance(job, dict) else Path()
        if place.is_absolute() or ".." in place.parts:  # of a sweep that was moved
            place = Path(place.name)
        if place.name not in ("", "..") and len(place.name) < 200 and "\0" not in place.name:
            jobs[sweep / place] = _words(job.get("overrides"))
    return jobs


def _words(listed: Any) -> list[str]:
    return [str(word) for word in listed] if isinstance(listed, list) else []


def read_run(folder: Path, name: str, job: Sequence[str] = (), metric: str = GREEDY) -> Run:
    """Return one run; `job` are the overrides that a sweep lists for it, used if it has no record."""
    notes: list[str] = []
    status, summary = (_object(folder / file, notes) for file in (layout.STATUS, layout.SUMMARY))
    rows, of_rows = read_rows(folder / layout.METRICS)
    try:
        record = read_record(folder)
    except UserError as error:
        record = None
        notes.insert(0, plain(str(error).removeprefix(f"{folder}{os.sep}")))
    if record and (changed := _words(record.about.get("changed"))):
        notes.append(plain(f"changed on the way: {', '.join(changed)}"))
    words, command = _words(status.get("overrides")) or job, str(status.get("command", "train"))
    recorded = settings_of_overrides(words, command) if record is None else settings_of_record(record)
    if recorded.command == "eval":  # has no steps; its results are in its summary
        numbers = {key: value for key, value in summary.items() if is_a(float, value)}
        rows = [{key: float(it) for key, it in numbers.items() if abs(it) <= sys.float_info.max} | {"step": 0.0}]
    steps = [row for row in rows if row["step"] > 0]
    last = (steps or [{}])[-1]
    code = summary.get("code")
    state, reason = _state_of(folder, status, summary)
    return Run(
        folder,
        name,
        state,
        reason,
        recorded,
        curve_of(rows, metric),
        accuracies=tuple(sorted(filter(_AN_ACCURACY.fullmatch, set().union(*rows)))),
        steps=int(rows[-1]["step"]) if rows else 0,
        seconds=last.get("clock/train_seconds"),
        generated_tokens=last.get("tokens/generated"),
        trained_tokens=last.get("tokens/trained"),
        peak_bytes=max(curve_of(steps, "memory/peak_bytes").values, default=None),
        code={plain(name): plain(value) for name, value in code.items() if value} if isinstance(code, dict) else {},
        notes=(*notes, *of_rows),
        series={name: curve_of(steps, name) for name in SERIES},
        began=str(record.about.get("began", "")) if record else "",
    )


def _state_of(folder: Path, status: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[State, str]:
    """Return running if a process holds its lock, or its launcher that of the sweep; else what the launcher recorded,
    or the run itself."""
    launched, ended = status.get("state"), summary.get("status")
    if is_held(folder) or (launched == State.RUNNING and is_held(folder.parent)):
        return State.RUNNING, ""
    reason = plain(status.get("reason") or summary.get("error") or "")
    if ended == State.COMPLETED:  # also by hand, after its sweep
        return State.COMPLETED, ""
    if launched in (State.WAITING, State.SKIPPED, State.FAILED):
        return State(launched), reason
    if ended in (State.INTERRUPTED, State.FAILED):
        return State(ended), reason
    if not folder.exists():
        return State.WAITING, f"listed in {layout.SWEEP}, not begun"
    return State.UNFINISHED, f"no {layout.SUMMARY}, and no process is at it"


def _object(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return a JSON object; empty without a file, or with a note if it is unreadable."""
    try:
        return read_object(path)
    except UserError as error:
        notes.append(plain(str(error).removeprefix(f"{path.parent}{os.sep}")))
        return {}


def read_rows(path: Path) -> tuple[list[dict[str, float]], list[str]]:
    """Return the records of a `metrics.jsonl` in the order of their steps, each step once, and notes on what was left
    out.

    A record replaces earlier ones of its own and later steps: a resumed run went back to that point.
    """
    rows: list[dict[str, float]] = []
    notes: list[str] = []
    for row in records(path, _row, notes):
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    return rows, notes


def _row(line: bytes) -> dict[str, float]:
    """Return one record: names and numbers. ValueError or TypeError for anything else."""
    # No integer is too large for a float; "NaN" and "Infinity" are how `files.json_line` writes them.
    row = {name: float(value) for name, value in json.loads(line, parse_int=float).items()}
    if not (row.get("step", -1.0) >= 0 and row["step"] < math.inf):
        raise ValueError("no step")
    return row


def records(file: Path, parse: Callable[[bytes], Row], notes: list[str]) -> Iterator[Row]:
    """Yield what `parse` makes of each line; lines for which it raises are counted in the notes."""
    bad: list[int] = []
    try:
        with open(file, "rb", opener=regular) as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    if line.strip():
                        yield parse(line)
                except _NO_RECORD:
                    bad.append(number)
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{file.name} cannot be read: {error.strerror}")
    if bad:
        notes.append(f"{file.name}: lines left out that cannot be read: {len(bad)}, the first is line {bad[0]}")
