"""Questions and answers from a JSONL file or a data set of the Hugging Face hub: read and checked, row by row.

The two sources differ only in where records come from and in how a row is named to a person.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from grpo_cli.runs.files import regular
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain

HUB = "hub:"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One problem as it stands in the source. `number` counts from 1: the line of a file, the row of a hub split."""

    number: int
    question: str
    answer: str
    record: Mapping[str, Any] = field(default_factory=dict, compare=False)  # all its fields, these two among them


def where(source: str, number: int) -> str:
    """A row as a person finds it."""
    return f"{source}, {'row' if source.startswith(HUB) else 'line'} {number}"


def read_rows(source: str, key: str, question_field: str, answer_field: str) -> list[Row]:
    """All rows of a JSONL file, or of `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`.

    `key` is the setting that named the source (`task.path`), for messages. Blank lines are no rows; anything else that
    is not a row is a UserError with its place. An answer may be a JSON number, which is kept as it was written.
    """
    records = _hub_records(source, key) if source.startswith(HUB) else _file_records(source, key)
    fields = (question_field, answer_field)
    rows = [Row(number, *_texts(record, fields, where(source, number)), record) for number, record in records]
    if not rows:
        raise UserError(f"{key}={source} is empty; it needs one JSON object per line with {' and '.join(fields)}")
    return rows


def _file_records(source: str, key: str) -> Iterator[tuple[int, Any]]:
    try:
        with open(Path(source).expanduser(), "rb", opener=regular) as file:
            for number, line in enumerate(file, 1):
                if text := line.removeprefix(_BYTE_ORDER_MARK).strip():
                    yield number, _parsed(text, where(source, number))
    except OSError as error:
        found = "there is no such file" if isinstance(error, FileNotFoundError) else f"{error.strerror}"
        raise UserError(
            f"{key}={source} cannot be read: {found} (looked for {Path(source).expanduser().absolute()}); "
            "give the path of a JSONL file"
        ) from error


def _parsed(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"), parse_float=Decimal, parse_constant=_not_a_number)
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8 text: byte {error.start + 1} is {line[error.start]:#04x}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} cannot be read as JSON: {error}") from error


def _not_a_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON value")


def _texts(record: Any, fields: tuple[str, str], place: str) -> tuple[str, str]:
    """The question and the answer of a record, as text."""
    if not isinstance(record, Mapping):
        raise UserError(f"{place} must be a JSON object with {' and '.join(fields)}, but is a {type(record).__name__}")
    missing = [f"{name!r} (task.{word}_field)" for name, word in _named(fields) if name not in record]
    if missing:
        found = ", ".join(map(plain, record)) or "none"
        raise UserError(f"{place} has no field {' and no field '.join(missing)}; the fields found are: {found}")
    for name, _ in _named(fields):
        _check_text(record[name], f"{place}: field {name!r}")
    return str(record[fields[0]]), str(record[fields[1]])


def _check_text(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise UserError(f"{name} must be text or a number, but is {json.dumps(value, default=str)[:80]}")
    if not str(value).strip():
        raise UserError(f"{name} is blank")
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} has half of a surrogate pair at character {error.start + 1}") from error


def _named(fields: tuple[str, str]) -> Iterable[tuple[str, str]]:
    return zip(fields, ("question", "answer"), strict=True)


def _hub_records(source: str, key: str) -> Iterator[tuple[int, Any]]:
    """Rows of a hub data set. Only data files are read: `datasets` no longer runs scripts of a data set."""
    name, *config, split = parts if len(parts := source.removeprefix(HUB).split(":")) in (2, 3) else ("", "")
    if not name or not split:
        raise UserError(f"{key}={source} must read {HUB}NAME:SPLIT or {HUB}NAME:CONFIG:SPLIT, or be a JSONL file")
    advice = f"without the hub, download the data and give {key}=<file.jsonl>"
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{source} is read with the package `datasets`, which is not installed: "
            f"pip install 'grpo-cli[hub]'; {advice}"
        ) from error
    try:
        table = datasets.load_dataset(name, *config, split=split)
    except (OSError, ValueError) as error:  # no network, no such data set; no such configuration or split
        raise UserError(f"{source} could not be read from the hub: {error}; {advice}") from error
    yield from enumerate(table, 1)
