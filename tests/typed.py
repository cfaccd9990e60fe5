"""`grpo` as it is typed, in the process of the tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from grpo_cli.cli.main import app


def grpo(*words: object) -> Result:
    """Return how the command ended."""
    return CliRunner().invoke(app, [str(word) for word in words], prog_name="grpo")


def done(*words: object) -> str:
    """Return what a command that works prints."""
    result = grpo(*words)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: object) -> str:
    """Return the message of a command that is refused."""
    result = grpo(*words)
    assert result.exit_code == 2 and "Traceback" not in result.stderr, result.output
    assert result.stderr.startswith("error: ") or "\nerror: " in result.stderr, result.stderr
    return result.stderr


def content(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def json_lines(path: Path) -> list[Any]:
    """Return the objects of a file's lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def lasting(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics without those that differ from one run of the same to the next."""
    return {name: x for name, x in metrics.items() if not name.startswith(("time/", "clock/", "speed/", "memory/"))}
