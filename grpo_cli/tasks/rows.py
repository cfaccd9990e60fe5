"""Questions and answers from a JSONL file or a data set of the Hugging Face hub: read and checked, row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
class Problem:
    """A question with its answer. `line` counts from 1: the line of a file, the row of a hub split; `place` names it
    in messages, and `row` holds all its fields, for a reward function."""

    line: int
    place: str
    question: str
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)


def where(source: str, number: int) -> str:
    """A row's place, for messages."""
    return f"{source}, {'row' if source.startswith(HUB) else 'line'} {number}"


def read_rows(source: str, key: str, question_field: str, answer_field: str) -> list[Problem]:
    """All rows of a JSONL file, or of `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`, each with its answer field's text.

    `key` is the setting that named the source (`task.path`), for messages. Blank lines are skipped; anything else that
    is not a row is a UserError with its place. An answer may be a JSON number, which is kept as it was written.
    """
    records = _hub_records(source, key) if source.startswith(HUB) else _file_records(source, key)
    fields = {question_field: "question", answer_field: "answer"}
    rows = []
    for number, record in records:
        place = where(source, number)
        _check(record, fields, place)
        rows.append(Problem(number, place, str(record[question_field]), str(record[answer_field]), record))
    if not rows:
        raise UserError(f"{key}={source} is empty; it needs one JSON object per line with {' and '.join(fields)}")
    return rows


def _file_records(source: str, key: str) -> Iterator[tuple[int, Any]]:
    path = Path(source).expanduser()
    try:
        with open(path, "rb", opener=regular) as file:
            for number, line in enumerate(file, 1):
                if text := line.removeprefix(_BYTE_ORDER_MARK).strip():
                    yield number, _parsed(text, where(source, number))
    except OSError as error:
        raise UserError(
            f"{key}={source} cannot be read: {error.strerror} (tried {path.absolute()}); give the path of a JSONL file"
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


def _check(record: Any, fields: Mapping[str, str], place: str) -> None:
    """UserError unless the record holds text or a number in each of the fields."""
    if not isinstance(record, Mapping):
        raise UserError(f"{place} must be a JSON object with {' and '.join(fields)}, but is a {type(record).__name__}")
    if missing := [f"{name!r} (task.{word}_field)" for name, word in fields.items() if name not in record]:
        found = ", ".join(map(plain, record)) or "none"
        raise UserError(f"{place} has no field {' and no field '.join(missing)}; the fields found are: {found}")
    for name in fields:
        value = record[name]
        if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
            shown = json.dumps(value, default=str)[:80]
            raise UserError(f"{place}: field {name!r} must be text or a number, but is {shown}")
        if not str(value).strip():
            raise UserError(f"{place}: field {name!r} is blank")
        try:
            str(value).encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{place}: field {name!r} has half of a surrogate pair at character {error.start + 1}"
            ) from error


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
