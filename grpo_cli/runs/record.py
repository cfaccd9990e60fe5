"""The record of a run: `run.json`, its composed config and code, written after every check has passed, and again by a
later start that changes settings.
"""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_cli import __version__
from grpo_cli.runs.files import content, sha256, write_object
from grpo_cli.runs.layout import RUN
from grpo_cli.support.errors import UserError

SOURCE = Path(__file__).resolve().parents[2]
GIT_SECONDS = 3.0  # timeout; git usually answers within 0.1 s


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


def write_record(folder: Path, record: RunRecord) -> None:
    """Write the folder's `run.json`."""
    write_object(folder / RUN, {name: value for name, value in asdict(record).items() if name != "source"})


def digests(names: Iterable[Any]) -> dict[str, str]:
    """Return the SHA-256 of each of these names that is a file's, by name."""
    found = {}
    for name in names:
        with suppress(OSError, ValueError, RuntimeError):  # of text that is no path, or names nobody's home
            if isinstance(name, str) and (path := Path(name).expanduser()).is_file():
                found[name] = sha256(path)
    return found


def check_data(folder: Path, before: RunRecord, now: RunRecord) -> None:
    """Raise UserError if a file that the run began with holds other data now: prompts are known by their lines."""
    then = before.about.get("data", {})
    for name, digest in now.about["data"].items():
        if then.get(name, digest) != digest:
            raise UserError(f"{name} has changed since the run in {folder} began; put it back, or start a new run")


def read_record(folder: Path) -> RunRecord | None:
    """Return the record of the run in this folder; None without a record. UserError if it is damaged."""
    from pydantic import TypeAdapter, ValidationError

    path = folder / RUN
    try:
        return replace(TypeAdapter(RunRecord).validate_json(content(path), strict=True), source=path)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = error if isinstance(error, OSError) else error.errors()[0]["msg"]
        raise UserError(f"{path} is damaged ({reason}); put it back, or begin with model.path=<checkpoint>") from error


@functools.cache
def code_version() -> dict[str, str | None]:
    """Return the versions at the first call: later edits of the checkout do not change what runs."""
    code = {"grpo_cli": __version__, "commit": commit_of(SOURCE), "python": platform.python_version()}
    return code | {name: version(name) for name in ("torch", "transformers")}


def commit_of(folder: Path) -> str | None:
    """Return the commit of the git checkout at this folder, with "-dirty" if a tracked file differs; None without one.

    Neither the current directory, the environment nor a parent folder can make git report another repository.
    """
    git = ["git", "--no-optional-locks", f"--git-dir={folder / '.git'}", f"--work-tree={folder}"]
    described = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run([*git, *described], cwd=folder, capture_output=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.decode().strip() if found.returncode == 0 else None
