"""Questions and answers from a JSONL or Parquet file or a data set of the hub: read and checked, row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from grpo_cli.runs.files import regular
from grpo_cli.support.errors import UserError
from grpo_cli.support.extras import require
from grpo_cli.support.formatting import plain
from grpo_cli.tasks.prompting import Message

HUB, PARQUET = "hub:", ".parquet"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Problem:
    """A question with its answer. `line` counts from 1: the line or row of a file, the row of a hub split; `place`
    names it in messages, and `row` holds all its fields as they were read (`of_json` is what a reward function gets).

    A question that is a chat has `messages`. Its text, which identifies the problem, is the content of its only message
    if that is a user's, else all messages as JSON.
    """

    line: int
    place: str
    question: str
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)
    messages: tuple[Message, ...] = ()


def where(source: str, number: int) -> str:
    """A row's place, for messages."""
    return f"{source}, {'row' if source.startswith(HUB) or source.lower().endswith(PARQUET) else 'line'} {number}"


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """The value of a field; `a.b` is field b of field a, unless a field is called `a.b`. KeyError if there is none."""
    if name in row:
        return row[name]
    above, _, below = name.partition(".")
    inner = row[above]
    if not below or not isinstance(inner, Mapping):
        raise KeyError(name)
    return value_of(inner, below)


def _names(row: Mapping[str, Any]) -> Iterator[str]:
    """The names of a row's fields, nested ones with dots."""
    for name, value in row.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{below}" for below in _names(value))


def read_rows(source: str, key: str, question_field: str, answer_field: str) -> list[Problem]:
    """All rows of a JSONL or Parquet file, or of `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`, each with its answer
    field's text.

    `key` is the setting that named the source (`task.path`), for messages. Blank lines are skipped; anything else that
    is not a row is a UserError with its place. An answer may be a JSON number, which is kept as it was written.
    """
    fields = {question_field: "question", answer_field: "answer"}
    rows = []
    for number, record in records(source, key):
        place = where(source, number)
        question, answer = _checked(record, fields, place)
        messages = tuple(of_json(question)) if isinstance(question, list) else ()
        text = _as_text(messages) if messages else str(question)
        rows.append(Problem(number, place, text, str(answer), record, messages))
    if not rows:
        raise UserError(f"{key}={source} is empty; it needs one JSON object per line with {' and '.join(fields)}")
    return rows


def of_json(value: Any) -> Any:
    """Return a copy of a row or value for a user's code, with JSON's types whatever the format: decimals are floats."""
    if isinstance(value, Mapping):
        return {name: of_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [of_json(item) for item in value]
    if isinstance(value, (date, time)):
        return value.isoformat()
    return float(value) if isinstance(value, Decimal) else value


def records(source: str, key: str) -> Iterator[tuple[int, Any]]:
    """The rows of a source as they are, each with its number."""
    is_table = source.lower().endswith(PARQUET)
    reader = _hub_records if source.startswith(HUB) else _parquet_records if is_table else _file_records
    return reader(source, key)


def _as_text(messages: Sequence[Message]) -> str:
    alone = len(messages) == 1 and messages[0].keys() == {"role", "content"} and messages[0]["role"] == "user"
    return messages[0]["content"] if alone else json.dumps(messages, default=str, ensure_ascii=False, sort_keys=True)


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
    raise ValueError(f"{word} is not a JSON value")


def _checked(record: Any, fields: Mapping[str, str], place: str) -> list[Any]:
    """The values of the fields. UserError unless they are text or a number, or a question that is a chat."""
    if not isinstance(record, Mapping):
        raise UserError(f"{place} must be a JSON object with {' and '.join(fields)}, but is a {type(record).__name__}")
    values = {}
    for name in fields:
        with suppress(KeyError):
            values[name] = value_of(record, name)
    if missing := [f"{name!r} (task.{word}_field)" for name, word in fields.items() if name not in values]:
        found = ", ".join(map(plain, _names(record))) or "none"
        raise UserError(f"{place} has no field {' and no field '.join(missing)}; the fields found are: {found}")
    for name, value in values.items():
        named = f"{place}: field {name!r}"
        if isinstance(value, list) and fields[name] == "question":
            _check_messages(value, named)
        elif isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
            chat = ", or a list of messages" if fields[name] == "question" else ""
            raise UserError(f"{named} must be text or a number{chat}, but is {_shown(value)}")
        elif not str(value).strip():
            raise UserError(f"{named} is blank")
        try:
            (str(value) if not isinstance(value, list) else json.dumps(value, default=str, ensure_ascii=False)).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{named} has half of a surrogate pair at character {error.start + 1}") from error
    return [values[name] for name in fields]


def _check_messages(messages: list[Any], named: str) -> None:
    """UserError unless a chat template can render them and the model speaks next."""
    for message in messages:
        is_one = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_one or not (isinstance(message.get("content"), str) or message.get("tool_calls")):
            raise UserError(
                f"{named} must be text or a number, or a list of messages, each with a role and a content that are "
                f"text, but holds {_shown(message)}"
            )
    if not messages or messages[-1]["role"] == "assistant":
        end = "ends with an assistant message" if messages else "is an empty list"
        raise UserError(f"{named} {end}, but the model speaks next: end it with a user message")


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]


def _parquet_records(source: str, key: str) -> Iterator[tuple[int, Any]]:
    require("pyarrow", f"{key}={source}", "or give a JSONL file")
    from pyarrow import ArrowException, parquet

    path, number = Path(source).expanduser(), 0
    try:
        with open(path, "rb", opener=regular) as file:
            for batch in parquet.ParquetFile(file).iter_batches():
                for record in batch.to_pylist():
                    yield (number := number + 1), record
    except (OSError, ArrowException) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{key}={source} cannot be read: {reason} (tried {path.absolute()}); give the path of a Parquet file"
        ) from error


def _hub_records(source: str, key: str) -> Iterator[tuple[int, Any]]:
    """Rows of a hub data set. Only data files are read: `datasets` no longer runs scripts of a data set."""
    name, *config, split = parts if len(parts := source.removeprefix(HUB).split(":")) in (2, 3) else ("", "")
    if not name or not split:
        raise UserError(
            f"{key}={source} must read {HUB}NAME:SPLIT or {HUB}NAME:CONFIG:SPLIT, or be a JSONL or Parquet file"
        )
    advice = f"without the hub, download the data and give {key}=<file.jsonl>"
    require("datasets", f"{key}={source}", advice)
    import datasets

    try:
        table = datasets.load_dataset(name, *config, split=split)
    except (OSError, ValueError) as error:  # no network, no such data set; no such configuration or split
        raise UserError(f"{source} could not be read from the hub: {error}; {advice}") from error
    yield from enumerate(table, 1)
