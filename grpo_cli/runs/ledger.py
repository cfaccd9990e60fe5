"""What a run's files of records held at a checkpoint, so that rows missing, doubled or altered since are noticed.

A checkpoint keeps of each file how many bytes were written to it until then, with their CRC-32, and the steps that
could not be written. Its array has rows of four numbers: step, lines, bytes, CRC. Older versions left one for each
step; now there is one for all that was written, and one without lines for each step that was lost.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from grpo_cli.runs.files import regular, sync_file, written_atomically
from grpo_cli.runs.layout import LEDGER
from grpo_cli.support.errors import UserError

_PIECE = 2**20  # bytes of a file that are read at once


class WrittenRows(NamedTuple):
    """Rows up to `step` that stand together. Without lines: a step of which a record, or a part of one, was lost."""

    step: int
    lines: int
    size: int  # bytes
    crc: int


@dataclass
class Ledger:
    """What was written to one file: `size` bytes with this CRC-32, for steps up to `last_step`."""

    last_step: int = -1
    size: int = 0
    crc: int = 0
    lost: list[int] = field(default_factory=list)

    def add(self, step: int, data: bytes) -> None:
        self.last_step = max(self.last_step, step)
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)

    def lose(self, step: int) -> None:
        self.last_step = max(self.last_step, step)
        self.lost.append(step)

    def blocks(self) -> list[WrittenRows]:
        written = [WrittenRows(self.last_step, 1, self.size, self.crc)] if self.size else []
        return [*written, *(WrittenRows(step, 0, 0, 0) for step in self.lost)]


def save_ledgers(folder: Path, ledgers: Mapping[str, Ledger]) -> None:
    """Leave them in a checkpoint's folder."""
    found = {name: np.array(ledger.blocks(), dtype=np.uint64).reshape(-1, 4) for name, ledger in ledgers.items()}
    np.savez_compressed(folder / LEDGER, allow_pickle=False, **found)


def load_ledgers(folder: Path) -> dict[str, list[WrittenRows]]:
    """The blocks of a checkpoint, by file; empty if it is of a version that left none."""
    if not (folder / LEDGER).exists():
        return {}
    try:
        with open(folder / LEDGER, "rb", opener=regular) as file, np.load(file, allow_pickle=False) as found:
            blocks = {name: [WrittenRows(*row) for row in rows.tolist()] for name, rows in found.items()}
        if any(type(number) is not int or number < 0 for rows in blocks.values() for row in rows for number in row):
            raise ValueError("it holds what no count is")
        return blocks
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{folder / LEDGER} is damaged ({error}); name another checkpoint of the run") from error


def as_written(path: Path, blocks: Sequence[WrittenRows]) -> Ledger | None:
    """The ledger of a file that begins with exactly what was written to it until then; None if it does not."""
    ledger = Ledger()
    if (path.stat().st_size if path.exists() else 0) < sum(block.size for block in blocks):
        return None
    with open(path, "rb", opener=regular) if path.exists() else BytesIO() as file:
        for block in blocks:
            crc = 0
            for piece in _pieces(file, block.size):
                crc = zlib.crc32(piece, crc)
                ledger.add(block.step, piece)
            if crc != block.crc:
                return None
            if not block.lines:
                ledger.lose(block.step)
    return ledger


def _pieces(file: BinaryIO, count: int) -> Iterator[bytes]:
    while count and (piece := file.read(min(count, _PIECE))):
        count -= len(piece)
        yield piece


@dataclass(frozen=True)
class RecordState:
    """A file of a run that goes on: what of it stays, and what is wrong with that. `intact`: it is the beginning."""

    ledger: Ledger
    intact: bool = True
    problems: Sequence[str] = ()


def look(path: Path, last: int, blocks: Sequence[WrittenRows] | None, every_step: bool) -> RecordState:
    """A file of a run that goes on after step `last`. Only where nothing is known of what was written, or where that is
    not what is there, its rows are read: none may be damaged, and with `every_step` each step has to have one."""
    intact = as_written(path, blocks) if blocks is not None else None
    if intact is not None:
        return RecordState(intact)
    problems = [] if blocks is None else [f"{path.name} is not as it was when the checkpoint was saved"]
    lost = {block.step for block in blocks or () if not block.lines}
    ledger, seen = Ledger(last), []
    for number, step, line in rows_until(path, last):
        ledger.add(last, line)
        if step is None:
            problems.append(f"{path.name}, line {number} is no record")
        else:
            seen.append(step)
    due = [step for step in range(last + 1) if step not in lost]
    if every_step and seen != due:
        gone = {*due} - {*seen}
        lost |= gone
        wrong = f"lacks {len(gone)} steps from {min(gone)} on" if gone else "has its steps in disorder"
        problems.append(f"{path.name} {wrong}")
    ledger.lost = sorted(lost)
    return RecordState(ledger, False, problems)


def cut(path: Path, found: RecordState) -> None:
    """Leave of a file what was found: rows of later steps go, and a last line that was cut short."""
    if not path.exists() or path.stat().st_size == found.ledger.size:
        return
    if found.intact:
        os.truncate(path, found.ledger.size)
        return sync_file(path)
    with written_atomically(path) as new:
        for _, _, line in rows_until(path, found.ledger.last_step):
            new.write(line)


def rows_until(path: Path, last: int) -> Iterator[tuple[int, int | None, bytes]]:
    """The whole lines of steps up to `last`, with their numbers and steps. One that is no record, and so has no step,
    goes with the line before it."""
    if not path.exists():
        return
    before = 0
    with open(path, "rb", opener=regular) as file:
        for number, line in enumerate(file, start=1):
            step = _step_of(line)
            before = before if step is None else step
            if line.endswith(b"\n") and before <= last:
                yield number, step, line


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) and 0 <= step < 2**63 else None
