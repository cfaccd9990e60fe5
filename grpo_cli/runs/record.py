"""The record of a run's composed config: `run.json`, written once, after every check has passed; and `summary.json`,
written when it has ended.

A later start that changes settings adds `resumed_001.json` and so on; the newest counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_cli.runs.files import content, json_line, must_be_writable, sha256, write_atomically
from grpo_cli.runs.layout import EVERY_RESUMED, LOCK, METRICS, RESUMED, ROLLOUTS, RUN, SUMMARY
from grpo_cli.support.errors import UserError

_KINDS = {"command": str, "overrides": list, "choices": dict, "config": dict, "about": dict}


@dataclass(frozen=True)
class RunRecord:
    """`overrides` are those of the command line, without the run's folder and `resume`; `choices` the choice in each
    group; `config` the composed settings with references such as `${n}` unresolved. `source` is the file, None before
    it is written."""

    command: str
    overrides: tuple[str, ...]
    choices: Mapping[str, str]
    config: Mapping[str, Any]
    about: Mapping[str, Any]  # when, where and by which code the run was started
    source: Path | None = None


def write_record(folder: Path, record: RunRecord) -> Path:
    """Write the folder's `run.json`, or else the next `resumed_NNN.json`. UserError if that fails."""
    files = _files(folder)
    number = int(files[-1].stem.partition("_")[2] or 0) + 1 if files else 0
    path = folder / (RESUMED.format(number) if number else RUN)
    values = {name: value for name, value in asdict(record).items() if name != "source"}
    with must_be_writable(path):
        write_atomically(path, f"{json_line(values, indent=1)}\n".encode())
    return path


def digests(names: Iterable[Any]) -> dict[str, str]:
    """Return the SHA-256 of each of these names that is a file's, by name."""
    found = {}
    for name in names:
        with suppress(OSError, ValueError):  # what cannot be read is refused by what reads it
            if isinstance(name, str) and (path := Path(name).expanduser()).is_file():
                found[name] = sha256(path)
    return found


def check_data(folder: Path, before: RunRecord, now: RunRecord) -> None:
    """UserError if a file that the run began with holds other data now: prompts are known by their lines."""
    data = before.about.get("data")
    then = data if isinstance(data, dict) else {}
    for name, digest in now.about["data"].items():
        if then.get(name, digest) != digest:
            raise UserError(
                f"{name} has changed since the run in {folder} began; put it back, or start a new run "
                "(model.path=<checkpoint>)"
            )


def begun_as(folder: Path) -> RunRecord | None:
    """Return the first record of the run in this folder, whatever has changed since; None without a record."""
    files = _files(folder)
    return _read(files[0]) if files else None


def read_record(folder: Path) -> RunRecord | None:
    """Return the latest record of the run in this folder; None without a record. UserError if it is damaged."""
    files = _files(folder)
    return _read(files[-1]) if files else None


def has_record(folder: Path) -> bool:
    """True if the folder has a record, damaged or not."""
    return bool(_files(folder))


def _files(folder: Path) -> list[Path]:
    return [*folder.glob(RUN), *sorted(folder.glob(EVERY_RESUMED))]


def _read(path: Path) -> RunRecord:
    try:
        values = json.loads(content(path).decode())
        odd = [name for name, kind in _KINDS.items() if not isinstance(values[name], kind)]
        if odd or not all(isinstance(word, str) for word in values["overrides"]):
            raise ValueError(f"of a wrong type: {', '.join(odd or ['overrides'])}")
        known = {name: values[name] for name in _KINDS} | {"overrides": tuple(values["overrides"])}
        return RunRecord(**known, source=path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({error}); put it back, or start a new run from a checkpoint of this one "
            "(model.path=<checkpoint>)"
        ) from error


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json` atomically, with non-finite numbers as strings (`files.json_line`)."""
    with must_be_writable(run_dir / SUMMARY):
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir / SUMMARY, (json_line(summary, indent=2) + "\n").encode())


@contextmanager
def failure_noted(run_dir: Path, is_new: bool) -> Iterator[None]:
    """Write `summary.json` also for a failure before the run has begun, such as in loading its model. After a refusal
    a new folder is emptied instead; the folder of a run that did begin is left alone."""
    try:
        yield
    except BaseException as error:
        left = {path.name: path for path in run_dir.iterdir()}
        begun = SUMMARY in left or (METRICS in left and left[METRICS].stat().st_size > 0)
        if not begun and is_new and isinstance(error, UserError) and left.keys() <= {RUN, LOCK, METRICS, ROLLOUTS}:
            for path in left.values():
                path.unlink()
        elif not begun:
            with suppress(UserError):  # a full disk is not the original error
                write_summary(run_dir, {"status": "failed", "error": f"{type(error).__name__}: {error}"})
        raise
