"""A run's files of records: written in whole lines, and verified when the run is resumed.

A checkpoint stores for each file how many bytes had been written to it, with their CRC-32, so that rows missing,
duplicated or altered since are noticed; and the steps that could not be written. Its array has rows of four numbers:
step, lines, bytes, CRC. One row covers everything written, and one without lines stands for each lost step; older
versions have one for each step.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_cli.runs.files import regular, sync_file, written_atomically
from grpo_cli.runs.layout import LEDGER
from grpo_cli.support.errors import UserError

_PIECE = 2**20  # bytes of a file that are read at once
Block = Sequence[int]  # step, lines, bytes, CRC


class RecordFile:
    """One file: `size` bytes written for steps up to `last_step`, their CRC-32, and the steps that were lost."""

    def __init__(self, path: Path) -> None:
        self.path, self.last_step, self.size = path, -1, 0
        self.lost: list[int] = []
        self._crc, self._intact = 0, False

    def append(self, step: int, data: bytes) -> None:
        """Append all of the data or none: a partial write on a full disk is undone, and so is what an interrupted call
        left. OSError, and the step is lost, if there is no room."""
        left = memoryview(data)
        self.last_step = max(self.last_step, step)
        try:
            with open(self.path, "ab", buffering=0, opener=regular) as file:
                end = min(self.size, file.seek(0, os.SEEK_END))
                file.truncate(end)
                try:
                    while left:
                        left = left[file.write(left) :]
                except OSError:
                    file.truncate(end)
                    raise
        except OSError:
            self.lost.append(step)
            raise
        self._count(data)

    def blocks(self) -> list[Block]:
        """For a checkpoint."""
        written = [(self.last_step, 1, self.size, self._crc)] if self.size else []
        return [*written, *((step, 0, 0, 0) for step in self.lost)]

    def go_on(self, last: int, blocks: Sequence[Block] | None, every_step: bool) -> list[str]:
        """Continue the file of a run whose last step was `last`. Returns what is wrong with it; nothing is written
        before `cut`.

        Its rows are read only if it does not match the blocks, or there are none. Without blocks each row has to be a
        record and, with `every_step`, each step has to have one.
        """
        self.last_step, self.lost = last, [block[0] for block in blocks or () if not block[1]]
        self._intact = blocks is not None and self._begins_with(blocks)
        if self._intact:
            return []
        self.size = self._crc = 0
        steps, broken = [], []
        for number, step, line in _rows_until(self.path, last):
            self._count(line)
            if step is None:
                broken.append(number)
            else:
                steps.append(step)
        gone = {*range(last + 1)} - {*steps} - {*self.lost} if every_step else set()
        self.lost = sorted({*self.lost, *gone})
        if blocks is not None:
            return [f"{self.path.name} is not as it was when the checkpoint was saved"]
        problems = [f"{self.path.name}, line {broken[0]} is not a record"] if broken else []
        if every_step and steps != [*range(last + 1)]:
            wrong = f"lacks {len(gone)} steps from {min(gone)} on" if gone else "has its steps out of order"
            problems.append(f"{self.path.name} {wrong}")
        return problems

    def cut(self) -> None:
        """Remove rows after the last step, and an incomplete last line."""
        if not self.path.exists() or self.path.stat().st_size == self.size:
            return
        if self._intact:
            with open(self.path, "r+b", opener=regular) as file:
                file.truncate(self.size)
            return sync_file(self.path)
        with written_atomically(self.path) as new:
            for _, _, line in _rows_until(self.path, self.last_step):
                new.write(line)

    def _begins_with(self, blocks: Sequence[Block]) -> bool:
        if (self.path.stat().st_size if self.path.exists() else 0) < sum(block[2] for block in blocks):
            return False
        self.size = self._crc = 0
        if not self.path.exists():
            return True
        with open(self.path, "rb", opener=regular) as file:
            for _, _, size, expected in blocks:
                crc, end = 0, self.size + size
                while piece := file.read(min(end - self.size, _PIECE)):
                    crc = zlib.crc32(piece, crc)
                    self._count(piece)
                if crc != expected:
                    return False
        return True

    def _count(self, data: bytes) -> None:
        self.size += len(data)
        self._crc = zlib.crc32(data, self._crc)


def save_ledgers(folder: Path, blocks: Mapping[str, Sequence[Block]]) -> None:
    """Save the blocks of each file in a checkpoint's folder."""
    # No word beside the files: NumPy before 2.1 would keep allow_pickle=False as one of them.
    found: dict[str, Any] = {name: np.array(of, dtype=np.uint64).reshape(-1, 4) for name, of in blocks.items()}
    np.savez_compressed(folder / LEDGER, **found)


def load_ledgers(folder: Path) -> dict[str, list[Block]]:
    """The blocks of a checkpoint, by file."""
    try:
        with open(folder / LEDGER, "rb", opener=regular) as file, np.load(file, allow_pickle=False) as found:
            blocks = {name: array.tolist() for name, array in found.items()}
        for step, lines, size, crc in (row for rows in blocks.values() for row in rows):
            if any(type(number) is not int or number < 0 for number in (step, lines, size, crc)):
                raise ValueError("it holds numbers that are not counts")
        return blocks
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{folder / LEDGER} is damaged ({error}); name another checkpoint of the run") from error


def _rows_until(path: Path, last: int) -> Iterator[tuple[int, int | None, bytes]]:
    """The complete lines of steps up to `last`, with their numbers and steps. A line that is not a record has no step,
    and belongs to the line before it."""
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
