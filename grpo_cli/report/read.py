"""Reads run folders into frozen records: a run's settings, how it ended, and its curve. Compares nothing.

The files are untrusted: nothing in them is executed, no resolver runs, and a file that is damaged or half written
becomes a note on its run instead of stopping the report.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from grpo_cli.report.asked import Asked, asked_of, asked_with
from grpo_cli.report.curves import GREEDY, Curve, Rows, curve_of
from grpo_cli.report.lines import records
from grpo_cli.runs import layout
from grpo_cli.runs.files import content
from grpo_cli.runs.lock import is_held
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import duration, plain

# Parts of a step in order; evaluation and checkpoints are outside it.
PHASES = ("rollout", "reward", "logprobs", "update")
_A_RUN_HAS = (layout.METRICS, layout.SUMMARY, layout.STATUS, layout.RUN)
_NOT_BELOW = {layout.CHECKPOINTS, layout.WANDB, layout.TENSORBOARD, layout.BAD_BATCHES}


class State(StrEnum):
    """How a run ended, or that it has not yet."""

    COMPLETED = "completed"
    RUNNING = "running"
    WAITING = "waiting"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNFINISHED = "unfinished"  # without a summary: it was killed
    REPEATED = "repeated"  # completed, and so did a later run of the same settings and seed


_AN_ACCURACY = re.compile(r"eval/(accuracy|pass@[1-9][0-9]*)")


@dataclass(frozen=True)
class Run:
    """One run as read from its folder. Missing numbers are None.

    `curve` is of the requested accuracy, `accuracies` names those that the run has measured. `step_seconds` are means
    over steps of each measured one of PHASES, and `other`. `notes` say what could not be read.
    """

    folder: Path
    name: str
    state: State
    reason: str
    asked: Asked
    curve: Curve
    accuracies: tuple[str, ...] = ()
    accuracy_interval: tuple[float, float] | None = None  # 95 %, over problems, of the last evaluation
    problems: int | None = None  # of that evaluation
    steps: int = 0
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None
    generated_tokens: float | None = None
    trained_tokens: float | None = None
    peak_bytes: float | None = None
    entropy: float | None = None  # policy/entropy of the last step that has one
    turns: float | None = None  # turns/mean, likewise
    code: Mapping[str, str] = field(default_factory=dict)  # versions of the code, by package
    notes: tuple[str, ...] = ()

    @property
    def final_accuracy(self) -> float | None:
        return self.curve.accuracy[-1] if self.curve.accuracy else None

    @property
    def best_accuracy(self) -> float | None:
        return max(self.curve.accuracy, default=None)


@dataclass(frozen=True)
class FoundRuns:
    """Training runs, and the folders of other commands (evaluations, profiles) found with them."""

    runs: tuple[Run, ...]
    others: tuple[Run, ...]


def of_training(read: Sequence[Run], folders: Sequence[Path], metric: str) -> FoundRuns:
    """Return those of `read`, from `folders`, that are training runs. UserError if there is none, or if they have
    measured other accuracies than `metric`."""
    runs = tuple(run for run in read if run.asked.command == "train")
    others = tuple(run for run in read if run.asked.command != "train")
    if not runs:
        besides = f" ({len(others)} runs of other commands were found)" if others else ""
        named = ", ".join(plain(folder) for folder in folders)
        raise UserError(
            f"no training run in or below {named}{besides}; `grpo train` leaves them in {layout.OUTPUTS}/train, "
            f"`grpo train -m` in {layout.MULTIRUN}"
        )
    measured = sorted({name for run in runs for name in run.accuracies})
    if metric not in measured and (measured or metric != GREEDY):
        there = f"they have {', '.join(measured)}" if measured else "they were not evaluated (eval.every=0)"
        raise UserError(f"--metric={plain(metric)} is no accuracy in these runs: {there}")
    return FoundRuns(runs, others)


def read_all(folders: Sequence[Path], metric: str = GREEDY) -> list[Run]:
    """Return every run in or below the folders, each once, in the order of the folders and of their jobs' numbers;
    may be empty. `metric` is the accuracy to read. UserError if a folder does not exist."""
    found: dict[Path, tuple[str, Sequence[str] | None]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{plain(folder)} is not a folder: name run folders, sweep folders, or what holds them")
        try:
            for path, job in _run_folders(folder):
                found.setdefault(path.resolve(), (_short_name(path, folder, len(folders)), job))
        except OSError as error:
            raise UserError(f"{plain(error.filename)} cannot be read: {error.strerror}") from error
    return [read_run(path, name, job, metric) for path, (name, job) in found.items()]


def _short_name(path: Path, given: Path, num_given: int) -> str:
    """Return the run's folder relative to the given one; with the latter's own name if several were given."""
    if path == given or num_given > 1:
        return plain(given.resolve().name / path.relative_to(given))
    return plain(path.relative_to(given))


def _run_folders(folder: Path) -> Iterator[tuple[Path, Sequence[str] | None]]:
    """Run folders in or below `folder`; the jobs of a sweep in order, including those without a folder yet."""
    if any((folder / name).is_file() for name in _A_RUN_HAS):
        yield folder, None
        return
    jobs = jobs_of(folder)
    yield from jobs.items()
    names = sorted((entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)), key=_natural)
    for name in names:
        if name not in _NOT_BELOW and not name.startswith(".") and folder / name not in jobs:
            yield from _run_folders(folder / name)


def _natural(name: str) -> tuple[int, int, str]:
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def jobs_of(sweep: Path) -> dict[Path, Sequence[str] | None]:
    """Return the jobs that a sweep's launcher listed, folder to overrides; empty for any other folder."""
    jobs: dict[Path, Sequence[str] | None] = {}
    listed = _read_object(sweep / layout.SWEEP, []).get("jobs")
    for job in listed if isinstance(listed, list) else []:
        # By its last part, so that a sweep that was moved is found as well.
        name = Path(str(job.get("folder", ""))).name if isinstance(job, dict) else ""
        if name and name != "..":
            jobs[sweep / name] = _words(job.get("overrides"))
    return jobs


def _words(listed: Any) -> list[str] | None:
    return [str(word) for word in listed] if isinstance(listed, list) else None


def read_run(folder: Path, name: str, job: Sequence[str] | None = None, metric: str = GREEDY) -> Run:
    """Return one run; `job` are the overrides that a sweep lists for it, used if it has no config."""
    notes: list[str] = []
    status = _read_object(folder / layout.STATUS, notes)
    summary = _read_object(folder / layout.SUMMARY, notes)
    rows, of_rows = read_rows(folder / layout.METRICS)
    try:
        asked = asked_of(folder)
    except UserError as error:
        asked = None
        notes.insert(0, plain(str(error).removeprefix(f"{folder}{os.sep}")))
    if asked is None:
        asked = asked_with(_words(status.get("overrides", job)) or [], str(status.get("command", "train")))
    if asked.command == "eval":  # has no steps; its results are in its summary
        rows = [dict(_numbers({"step": 0, **summary}, set()))]
    state, reason = _state_of(folder, status, summary)
    run = Run(folder, name, state, reason, asked, curve_of(rows, metric), notes=(*notes, *of_rows))
    return _with_numbers(run, rows, metric, summary)


def _with_numbers(run: Run, rows: Rows, metric: str, summary: Mapping[str, Any]) -> Run:
    steps = [row for row in rows if row["step"] > 0]
    last: Mapping[str, float] = steps[-1] if steps else {}
    evaluated = [row for row in rows if metric in row]
    low, high = (evaluated[-1].get(f"{metric}_{end}") if evaluated else None for end in ("low", "high"))
    problems = evaluated[-1].get("eval/problems", evaluated[-1].get("problems")) if evaluated else None
    peaks = [row.get("memory/peak_bytes") for row in steps] + [_number(summary.get("peak_memory_bytes"))]
    return replace(
        run,
        accuracies=tuple(sorted(filter(_AN_ACCURACY.fullmatch, set().union(*rows)))),
        accuracy_interval=None if low is None or high is None else (low, high),
        problems=None if problems is None or not math.isfinite(problems) else int(problems),
        steps=int(rows[-1]["step"]) if rows else 0,
        step_seconds=_step_seconds(steps),
        seconds=last.get("clock/train_seconds", _number(summary.get("train_seconds"))),
        generated_tokens=last.get("tokens/generated", _number(summary.get("generated_tokens"))),
        trained_tokens=last.get("tokens/trained", _number(summary.get("trained_tokens"))),
        entropy=_last(steps, "policy/entropy"),
        turns=_last(steps, "turns/mean"),
        code=_code_of(summary.get("code")),
        peak_bytes=max((peak for peak in peaks if peak is not None and math.isfinite(peak)), default=None),
    )


def _last(steps: Rows, name: str) -> float | None:
    return next((row[name] for row in reversed(steps) if name in row), None)


def _step_seconds(steps: Rows) -> dict[str, float]:
    """Return mean seconds per step of each phase, and of the rest as `other`."""
    measured = [name for name in PHASES if any(f"time/{name}" in row for row in steps)]
    timed = [row for row in steps if math.isfinite(row.get("time/step", math.nan))]
    if not timed:
        return {}
    seconds = {name: sum(row.get(f"time/{name}", 0.0) for row in timed) / len(timed) for name in measured}
    rest = sum(row["time/step"] for row in timed) / len(timed) - sum(seconds.values())
    return {**seconds, "other": max(rest, 0.0)}


def _state_of(folder: Path, status: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[State, str]:
    """Return running if a process holds its lock; else what the launcher recorded, or the run itself."""
    if is_held(folder / layout.LOCK) or is_held(folder / layout.LOG):
        return State.RUNNING, _last_sign(folder)
    told, ended = status.get("state"), summary.get("status")
    reason = plain(status.get("reason") or summary.get("error") or "")
    if told in (State.WAITING, State.SKIPPED, State.FAILED):
        return State(told), reason
    if ended in (State.COMPLETED, State.INTERRUPTED, State.FAILED):
        return State(ended), reason
    if not folder.exists():
        return State.WAITING, f"listed in {layout.SWEEP}, not begun"
    return State.UNFINISHED, f"no {layout.SUMMARY}, and no process is at it; {_last_sign(folder)}"


def _last_sign(folder: Path) -> str:
    try:
        return f"last record {duration(time.time() - (folder / layout.METRICS).stat().st_mtime)} ago"
    except OSError:
        return "no record yet"


def _code_of(told: Any) -> dict[str, str]:
    code = {plain(name): value for name, value in told.items()} if isinstance(told, dict) else {}
    modified = " (modified)" if code.pop("modified", None) else ""
    return {name: plain(value) + modified * (name == "commit") for name, value in code.items() if value is not None}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return a JSON object; empty without a file, or with a note if it is unreadable."""
    try:
        value = _DECODER.decode(content(path).decode())
        if isinstance(value, dict):
            return value
        notes.append(f"{path.name} holds no JSON object")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {plain(error)}")
    return {}


# Integers as floats: all metrics are floats, and no number is too large for one.
_DECODER = json.JSONDecoder(parse_int=float)


def read_rows(path: Path) -> tuple[list[dict[str, float]], list[str]]:
    """Return the records of a `metrics.jsonl` in the order of their steps, each step once, and notes on what was left
    out.

    A record replaces earlier ones of its own and later steps: a resumed run went back to that point.
    """
    rows: list[dict[str, float]] = []
    notes: list[str] = []
    no_number: set[str] = set()
    for row in records(path, partial(_row, no_number=no_number), notes):
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    return rows, [*(f"{path.name}: {plain(name)} is not always a number" for name in sorted(no_number)), *notes]


def _row(line: bytes, no_number: set[str]) -> dict[str, float]:
    """Return one record. ValueError if it is not one; names of values that are not numbers are added to `no_number`."""
    row = _DECODER.decode(line.decode("utf-8"))
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    if any(type(value) is not float for value in row.values()):
        row = dict(_numbers(row, no_number))
    if not (row.get("step", -1.0) >= 0 and row["step"] < math.inf):
        raise ValueError("no step")
    return row


def _numbers(row: Mapping[str, Any], no_number: set[str]) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        try:
            yield name, float(value)  # "NaN" and "Infinity" are how `files.json_line` writes them
        except (TypeError, ValueError):
            no_number.add(name)
