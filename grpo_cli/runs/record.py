"""The record of a run's composed config: `run.json`, written once, after every check has passed.

A later start that changes settings adds `resumed_001.json` and so on; the newest counts. Each file holds a checksum of
itself and is never rewritten, and every checkpoint lists those that its run had.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_cli.runs.files import content, json_line, must_be_writable, sha256, write_atomically
from grpo_cli.runs.layout import CHAIN, EVERY_RESUMED, RESUMED, RUN
from grpo_cli.support.errors import UserError

_CHECKSUM = "sha256"
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
    path = folder / (RESUMED.format(len(files)) if files else RUN)
    values = {name: value for name, value in asdict(record).items() if name != "source"}
    text = json_line({**values, _CHECKSUM: _checksum(values)}, indent=1)
    with must_be_writable(path):
        write_atomically(path, f"{text}\n".encode())
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
                f"{name} has changed since the run in {folder} began, whose prompts are known by its lines; put it "
                "back, or start a new run (model.path=<checkpoint>)"
            )


def begun_as(folder: Path) -> RunRecord | None:
    """The first record of the run in this folder, whatever has changed since; None without a record."""
    files = _files(folder)
    return _read(files[0]) if files else None


def read_record(folder: Path) -> RunRecord | None:
    """The latest record of the run in this folder; None without a record.

    UserError if a record is damaged: no other settings are used instead.
    """
    files = _files(folder)
    for path in files[:-1]:
        _read(path)  # a damaged earlier one means that the files were tampered with
    return _read(files[-1]) if files else None


def chain_of(folder: Path) -> dict[str, str]:
    """The files of settings of the run in this folder, with their checksums, for its checkpoints."""
    return {path.name: sha256(path) for path in (folder / RUN, *sorted(folder.glob(EVERY_RESUMED))) if path.exists()}


def keep_chain(folder: Path, chain: Mapping[str, str]) -> None:
    """Save it in a checkpoint's folder."""
    write_atomically(folder / CHAIN, f"{json_line(chain, indent=1)}\n".encode())


def check_chain(checkpoint: Path) -> None:
    """UserError if the run's folder no longer has the settings that this checkpoint was made with."""
    now = chain_of(folder := checkpoint.parent.parent)
    try:
        made_with = dict(json.loads(content(checkpoint / CHAIN)))
    except (OSError, ValueError, TypeError) as error:
        raise _uncertain(checkpoint / CHAIN, "is missing or damaged") from error
    for name, checksum in made_with.items():
        if now.get(name) != checksum:
            what = "has been altered" if name in now else "is missing"
            raise _uncertain(folder / name, f"{what}, and {checkpoint.name} was made with it")


def has_record(folder: Path) -> bool:
    """Whether the folder has a record, damaged or not."""
    return bool(_files(folder))


def _files(folder: Path) -> list[Path]:
    """`run.json` and its successors in order. UserError if one is missing."""
    later = sorted(folder.glob(EVERY_RESUMED))
    files = [folder / name for name in (RUN, *(RESUMED.format(number) for number in range(1, len(later) + 1)))]
    missing = [path for path in files if not path.exists()]
    if later and missing:
        raise _uncertain(missing[0], f"is missing, and {later[-1].name} is there")
    return [] if missing else files


def _read(path: Path) -> RunRecord:
    try:
        values = json.loads(content(path).decode())
        expected = values.pop(_CHECKSUM)
        if expected != _checksum(values):
            raise ValueError("its checksum does not match")
        if any(not isinstance(values[name], kind) for name, kind in _KINDS.items()):
            raise ValueError("its values are of the wrong types")
        if not all(isinstance(word, str) for word in values["overrides"]):
            raise ValueError("its overrides are not strings")
        return RunRecord(**values | {"overrides": tuple(values["overrides"])}, source=path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _uncertain(path, f"is damaged ({reason})") from error


def _uncertain(path: Path, what: str) -> UserError:
    return UserError(
        f"{path} {what}, so the settings of this run are not certain; put it back as it was, or start a new run from a "
        "checkpoint of this one (model.path=<checkpoint>)"
    )


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json_line(values).encode()).hexdigest()
