"""Reads files of one record per line, which may be damaged or still being written; problems become notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from grpo_cli.runs.files import regular

Row = TypeVar("Row")
_NO_RECORD = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
MOST_NAMED = 10  # lines, in a note


def records(file: Path, parse: Callable[[bytes], Row], notes: list[str]) -> Iterator[Row]:
    """Yield what `parse` makes of each line; lines for which it raises are named in the notes.

    A record ends with its newline: a last line that lacks one and cannot be read is half written.
    """
    bad: list[str] = []
    try:
        with open(file, "rb", opener=regular) as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    if line.strip():
                        yield parse(line)
                except _NO_RECORD:
                    bad.append(str(number) if line.endswith(b"\n") else f"{number} (half written)")
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{file.name} cannot be read: {error.strerror}")
    if bad:
        named = ", ".join(bad[:MOST_NAMED]) + (", ..." if len(bad) > MOST_NAMED else "")
        notes.append(f"{file.name}: {'line' if len(bad) == 1 else 'lines'} {named} cannot be read and were left out")
