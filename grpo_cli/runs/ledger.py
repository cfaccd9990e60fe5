"""What a run's files of records held at a checkpoint, so that rows missing, doubled or altered since are found.

For each file a block per step, in the order of the rows: the step, its lines, their bytes and their CRC-32. A block
without lines is a record that could not be written. Looks at rows only when the bytes are not those that were written.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grpo_cli.runs.files import regular, sync_file, written_atomically
from grpo_cli.runs.layout import LEDGER
from grpo_cli.support.errors import UserError

Ledgers = Mapping[str, "Ledger"]  # by the name of the file


class StepRows(NamedTuple):
    """The rows of a step. `crc` is None where nobody knows what was written: a run of a version without ledgers."""

    step: int
    lines: int
    bytes: int
    crc: int | None


class Ledger:
    """The blocks of one file: 32 bytes a step."""

    def __init__(self, blocks: Iterable[StepRows] = ()) -> None:
        self._numbers = array("Q")
        self.bytes, self.last_step = 0, -1
        for block in blocks:
            self.add(block)

    def add(self, block: StepRows) -> None:
        assert block.crc is not None, "what was written is known"
        self._numbers.extend((block.step, block.lines, block.bytes, block.crc))
        self.bytes += block.bytes
        self.last_step = max(self.last_step, block.step)

    def __iter__(self) -> Iterator[StepRows]:
        numbers = iter(self._numbers)
        return (StepRows(*four) for four in zip(numbers, numbers, numbers, numbers, strict=True))


def save_ledgers(folder: Path, ledgers: Ledgers) -> None:
    """Leave them in a checkpoint's folder."""
    found = {name: np.array(list(ledger), dtype=np.uint64).reshape(-1, 4) for name, ledger in ledgers.items()}
    np.savez_compressed(folder / LEDGER, allow_pickle=False, **found)


def load_ledgers(folder: Path) -> dict[str, Ledger] | None:
    """Those of a checkpoint; None if it is of a version that had none."""
    if not (folder / LEDGER).exists():
        return None
    try:
        with open(folder / LEDGER, "rb", opener=regular) as file, np.load(file, allow_pickle=False) as found:
            return {name: Ledger(StepRows(*row) for row in rows.tolist()) for name, rows in found.items()}
    except (OSError, ValueError, TypeError, EOFError, OverflowError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{folder / LEDGER} is damaged ({error}); name another checkpoint of the run") from error


def missing_steps(ledgers: Ledgers) -> list[int]:
    """The steps of which a record, or a part of one, is in no file."""
    return sorted({block.step for ledger in ledgers.values() for block in ledger if not block.lines})


def is_intact(path: Path, ledger: Ledger) -> bool:
    """Whether a file begins with exactly what was written to it until then."""
    if not path.exists() or path.stat().st_size < ledger.bytes:
        return ledger.bytes == 0
    with open(path, "rb", opener=regular) as file:
        return all(zlib.crc32(file.read(block.bytes)) == block.crc for block in ledger)


@dataclass(frozen=True)
class Stretch:
    """Neighbouring rows of one step, as they stand in a file from line `first` on."""

    block: StepRows
    first: int
    damaged: tuple[int, ...] = ()  # the numbers of lines that are no record

    @property
    def where(self) -> str:
        return lines_named(self.first, self.block.lines)


@dataclass(frozen=True)
class Remains:
    """What there is of a file: its rows up to the last step that counts, as a ledger, and what is wrong with them.

    Of an `intact` file they are its first bytes. Else `kept` are the numbers of their lines.
    """

    ledger: Ledger
    intact: bool = True
    kept: Sequence[range] = ()
    problems: Sequence[str] = ()


def look(path: Path, last: int, kept: Ledger | None, once: bool) -> Remains:
    """A file of a run that goes on after step `last`. Without a ledger there is less to find: lines that are no record,
    and, if it has a row for each step `once`, whether it has."""
    if kept is not None and is_intact(path, kept):
        return Remains(kept)
    due = list(kept or ([StepRows(step, 1, 0, None) for step in range(last + 1)] if once else []))
    rows = rows_of_file(path, due, last)
    if kept is not None or once:
        wrong = list(differences(due, rows))
    else:
        wrong = [f"{_damaged([r])} (step {r.block.step}): damaged" for r in rows if r.damaged]
    here = Counter[int]()
    for r in rows:
        here[r.block.step] += r.block.lines
    gone = [StepRows(block.step, 0, 0, 0) for block in due if here[block.step] < max(block.lines, 1)]
    ranges = [range(r.first, r.first + r.block.lines) for r in rows]
    return Remains(Ledger([*(r.block for r in rows), *gone]), False, ranges, [f"{path.name}, {text}" for text in wrong])


def cut(path: Path, found: Remains) -> None:
    """Leave of a file what was found: rows of later steps go, and a last line that was cut short."""
    if not path.exists() or path.stat().st_size == found.ledger.bytes:
        return
    if found.intact:
        os.truncate(path, found.ledger.bytes)
        return sync_file(path)
    numbers = chain.from_iterable(found.kept)
    wanted = next(numbers, None)
    with written_atomically(path) as new:
        for number, line in whole_lines(path):
            if number == wanted:
                new.write(line)
                wanted = next(numbers, None)


def rows_of_file(path: Path, due: Sequence[StepRows], last: int) -> list[Stretch]:
    """All whole lines but those of steps after `last`. One that cannot be read counts as of the step that is due there,
    and if none is, as of the step before it."""
    found: list[Stretch] = []
    steps = chain.from_iterable(repeat(block.step, block.lines) for block in due)
    for number, line in whole_lines(path):
        read, expected = _step_of(line), next(steps, None)
        step = read if read is not None else expected if expected is not None else _step_before(found, due, last)
        if step > last:
            continue
        if not found or found[-1].block.step != step or found[-1].first + found[-1].block.lines != number:
            found.append(Stretch(StepRows(step, 0, 0, 0), number))
        rows, old = found[-1], found[-1].block
        block = StepRows(step, old.lines + 1, old.bytes + len(line), zlib.crc32(line, old.crc or 0))
        found[-1] = replace(rows, block=block, damaged=rows.damaged + (number,) * (read is None))
    return found


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file and their numbers, without a last one that was cut short."""
    if path.exists():
        with open(path, "rb", opener=regular) as file:
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.endswith(b"\n"))


def _step_before(found: Sequence[Stretch], due: Sequence[StepRows], last: int) -> int:
    """The step of a line that cannot be read where none is due: after all that is due, a later one."""
    return last + 1 if due else found[-1].block.step if found else 0


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) and 0 <= step < 2**63 else None


def differences(due: Sequence[StepRows], found: Sequence[Stretch]) -> Iterator[str]:
    """In words and with their lines, the steps of which the rows are not those that are due."""
    of_step: dict[int, list[Stretch]] = {}
    for rows in found:
        of_step.setdefault(rows.block.step, []).append(rows)
    line, wrong = 1, False
    for block in due:
        problem = _difference(block, of_step.pop(block.step, []), lines_named(line, block.lines))
        if problem:
            wrong = True
            yield problem
        line += block.lines
    for step, others in of_step.items():
        yield f"{_places(others)} (step {step}): not of this run"
    order = [block.step for block in due if block.lines]
    for rows, step in zip(found, order, strict=False):
        if not wrong and rows.block.step != step:
            yield f"{rows.where} (step {rows.block.step}): out of order, step {step} belongs there"
            return


def _difference(due: StepRows, rows: Sequence[Stretch], place: str) -> str:
    """What is wrong with the rows of a step; `place` is where they were."""
    lines, here = sum(r.block.lines for r in rows), f"{_places(rows)} (step {due.step})"
    if not rows and due.lines:
        return f"{place} (step {due.step}): missing"
    if lines < due.lines:
        return f"{here}: {due.lines - lines} of the step's {due.lines} lines are missing"
    if lines > due.lines:
        return f"{here}: doubled, {due.lines} of {lines} lines belong there"
    if damaged := _damaged(rows):
        return f"{damaged} (step {due.step}): damaged"
    if len(rows) > 1:
        return f"{here}: out of order"
    return f"{here}: altered" if rows and due.crc not in (None, rows[0].block.crc) else ""


def _damaged(rows: Sequence[Stretch]) -> str:
    return " and ".join(lines_named(number, 1) for r in rows for number in r.damaged)


def _places(rows: Sequence[Stretch]) -> str:
    return " and ".join(r.where for r in rows)


def lines_named(first: int, count: int) -> str:
    """
    >>> lines_named(17, 1), lines_named(33, 16)
    ('line 17', 'lines 33-48')
    """
    return f"line {first}" if count == 1 else f"lines {first}-{first + count - 1}"
