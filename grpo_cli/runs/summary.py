"""`summary.json`, written when a run has ended, and reading files of one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_cli.runs.files import content, json_line, must_be_writable, write_atomically
from grpo_cli.runs.layout import LOCK, METRICS, ROLLOUTS, RUN, SUMMARY
from grpo_cli.support.errors import UserError


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


def read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty if there is no file. UserError if it holds something else."""
    try:
        value = json.loads(content(path).decode())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); repair or remove it") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object; repair or remove it")
    return value
