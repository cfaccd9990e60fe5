"""Problems with answers, of a file or a data set of the hub: read, checked, split and made prompts."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

from grpo_cli.runs.files import regular
from grpo_cli.support.errors import UserError, explained
from grpo_cli.support.extras import require
from grpo_cli.support.formatting import plain
from grpo_cli.tasks.prompting import MadePrompts, Message, Prompting, Warn
from grpo_cli.types import Prompt

HUB, PARQUET, CSV = "hub:", ".parquet", ".csv"
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


def read_problems(source: str, key: str, question_field: str, answer_field: str) -> list[Problem]:
    """Read all rows of a file, or of `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`; `key` is the setting that named it.
    UserError for what is neither a row nor a blank line. An answer may be a JSON number, kept as it was written."""
    problems = []
    for number, row in records(source, key):
        place = where(source, number)
        question, answer = _field(row, question_field, "question", place), _field(row, answer_field, "answer", place)
        messages = tuple(of_json(question, nulls=False)) if isinstance(question, list) else ()
        text = _as_text(messages) if messages else str(question)
        problems.append(Problem(number, place, text, str(answer), row, messages))
    if not problems:
        raise UserError(f"{key}={source} is empty: give one JSON object per line with {question_field}, {answer_field}")
    return problems


def records(source: str, key: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a source as they are, each with its number. Raise UserError if it cannot be read."""
    if source.startswith(HUB):
        yield from enumerate(_hub_table(source, key), 1)
        return
    is_table = source.lower().endswith(PARQUET)
    if is_table:
        require("pyarrow", f"{key}={source}", "or give a JSONL file")
    path = Path(source).expanduser()
    try:
        with open(path, "rb", opener=regular) as file:
            if is_table:
                yield from _rows_of_table(file)
            elif source.lower().endswith(CSV):
                yield from _rows_of_csv(file, source)
            else:
                yield from _rows_of_lines(file, source)
    except OSError as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{key}={source} cannot be read: {reason} (tried {path.absolute()}); give .jsonl, .json, .csv or .parquet"
        ) from error


def _rows_of_table(file: Any) -> Iterator[tuple[int, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        batches = parquet.ParquetFile(file).iter_batches()
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
    except ArrowException as error:
        raise OSError(error) from error


def _rows_of_csv(file: Any, source: str) -> Iterator[tuple[int, Any]]:
    """Yield a dict of texts for each row below the first, which has the names of the fields."""
    reader = csv.DictReader((_text(line, where(source, number)) for number, line in enumerate(file, 1)), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise UserError(f"{where(source, reader.line_num)} has not one cell for each field: quote commas")
            yield reader.line_num, row
    except csv.Error as error:
        raise UserError(f"{where(source, reader.reader.line_num)} cannot be read as CSV: {error}") from error


def _rows_of_lines(file: Any, source: str) -> Iterator[tuple[int, Any]]:
    """Yield the JSON value of each line, or the items of the one array that the file is."""
    whole = file.peek(1 << 12).removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"[")
    for number, line in enumerate([file.read()] if whole else file, 1):
        if text := _text(line, where(source, number)).strip():
            try:
                row = json.loads(text, parse_float=Decimal, parse_constant=_not_a_number)
            except (ValueError, ArithmeticError, RecursionError) as error:
                raise UserError(f"{where(source, number)} cannot be read as JSON: {error}") from error
            yield from enumerate(row, 1) if whole else [(number, row)]


def _text(line: bytes, place: str) -> str:
    try:
        return line.removeprefix(_BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8: save the file as UTF-8") from error


def _not_a_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON value")


def _hub_table(source: str, key: str) -> Any:
    """Read a hub data set. Only data files are read: `datasets` no longer runs scripts of a data set."""
    name, *config, split = parts if len(parts := source.removeprefix(HUB).split(":")) in (2, 3) else ("", "")
    if not name or not split:
        raise UserError(f"{key}={source} must read {HUB}NAME:SPLIT or {HUB}NAME:CONFIG:SPLIT, or be a file")
    advice = f"without the hub, download the data and give {key}=<file.jsonl>"
    require("datasets", f"{key}={source}", advice)
    import datasets

    with explained(f"{source} could not be read from the hub", f"; {advice}"):
        return datasets.load_dataset(name, *config, split=split)


def where(source: str, number: int) -> str:
    """Return a row's place, for messages."""
    in_rows = source.startswith(HUB) or source.lower().endswith((PARQUET, ".json"))
    return f"{source}, {'row' if in_rows else 'line'} {number}"


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field; `a.b` is field b of field a, unless a field is called `a.b`. KeyError if none is."""
    if name in row:
        return row[name]
    above, _, below = name.partition(".")
    inner = row[above]
    if not below or not isinstance(inner, Mapping):
        raise KeyError(name)
    return value_of(inner, below)


def of_json(value: Any, nulls: bool = True) -> Any:
    """Return a copy of a row or value for a user's code, with JSON's types whatever the format: decimals are floats. A
    chat is read without `nulls`: Arrow gives each message the fields of all, which templates look for."""
    if isinstance(value, Mapping):
        return {name: of_json(item, nulls) for name, item in value.items() if nulls or item is not None}
    if isinstance(value, (list, tuple)):
        return [of_json(item, nulls) for item in value]
    if isinstance(value, (date, time)):
        return value.isoformat()
    return float(value) if isinstance(value, Decimal) else value


def _as_text(messages: Sequence[Message]) -> str:
    alone = len(messages) == 1 and messages[0].keys() == {"role", "content"} and messages[0]["role"] == "user"
    return messages[0]["content"] if alone else json.dumps(messages, default=str, ensure_ascii=False, sort_keys=True)


def _field(row: Any, name: str, word: str, place: str) -> Any:
    """Return the value of a field, a row's `word`. Raise UserError unless it is text or a number, or a question is a
    chat."""
    if not isinstance(row, Mapping):
        raise UserError(f"{place} must be a JSON object with {name}, but is a {type(row).__name__}")
    try:
        value = value_of(row, name)
    except KeyError as error:
        found = ", ".join(map(plain, row)) or "none"
        if len(row) == 1:
            found += "; cells are separated by commas" * (";" in found)
            found += "; a file of JSON is one array, or an object per line" * isinstance([*row.values()][0], list)
        raise UserError(f"{place} has no field {name!r} (task.{word}_field); the fields are: {found}") from error
    text, wrong = str(value), ""
    if isinstance(value, list) and word == "question":
        text, wrong = json.dumps(value, default=str, ensure_ascii=False), _wrong_chat(value)
    elif isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)) or not text.strip():
        chat = ", or a list of messages" * (word == "question")
        wrong = f"must be text or a number{chat}, but is {json.dumps(value, default=str)[:80]}"
    if not wrong and text.encode("utf-8", "replace").decode() != text:
        wrong = "has half of a surrogate pair"
    if wrong:
        raise UserError(f"{place}: field {name!r} {wrong}")
    return value


def _wrong_chat(messages: list[Any]) -> str:
    """Return what keeps a chat template from rendering the messages, or the model from speaking next; else nothing."""
    for message in messages or ["nothing"]:
        is_one = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_one or not (isinstance(message.get("content"), str) or message.get("tool_calls")):
            return f"must hold messages, each with a role and a content that are text, but holds {str(message)[:80]}"
    ends = messages[-1]["role"] == "assistant"
    return "ends with an assistant message, but the model speaks next: end it with a user message" if ends else ""


class LazyPrompts(MadePrompts):
    """Problems as prompts, tokenised one at a time on demand: a large file costs little at start-up.

    Only those that might be too long, judging by their bytes, are tokenised at once, to leave out what does not fit,
    and the first chat of each order of roles, for a template that refuses it. Others are refused when they are made.
    """

    def __init__(
        self,
        split: str,
        problems: Sequence[Problem],
        prompting: Prompting,
        max_tokens: int | None,
        warn: Warn,
        opens: Callable[[Mapping[str, Any], str], str],
    ) -> None:
        assert len({p.line for p in problems}) == len(problems), "a problem of a split has a line of its own"
        self._split, self._prompting, self._max_tokens, self._opens = split, prompting, max_tokens, opens
        lengths = self._lengths(problems)
        self.problems = [problem for problem in problems if problem.line not in lengths]
        if lengths:
            first = next(problem for problem in problems if problem.line in lengths)
            error = self._too_long(first, lengths[first.line])
            warn(f"{error}; {len(lengths)} of the {len(problems)} prompts of {split} are left out")
        if not self.problems:
            raise UserError(f"no prompt to {split} on is left; lower sampling.max_new_tokens or task.few_shot")
        super().__init__(lambda place: self._prompt(self.problems[place]), len(self.problems))

    @cached_property
    def of(self) -> Mapping[str, Problem]:
        """The problem that each prompt was made of, by its id."""
        return {self._id(problem): problem for problem in self.problems}

    def by_id(self, prompt_id: str) -> Prompt | None:
        return self._prompt(self.of[prompt_id]) if prompt_id in self.of else None

    def _id(self, problem: Problem) -> str:
        return f"{self._split}-{problem.line:06d}"

    def _prompt(self, problem: Problem) -> Prompt:
        """Build the prompt of the question, followed by the environment's opening text, as in TRL."""
        opening, messages = self._opens(of_json(problem.row), problem.place), problem.messages
        if opening and messages:
            messages = (*messages[:-1], {**messages[-1], "content": (messages[-1].get("content") or "") + opening})
        token_ids = self._prompting.encode(problem.question + opening, messages)
        if self._max_tokens is not None and len(token_ids) > self._max_tokens:
            raise self._too_long(problem, len(token_ids))
        return Prompt(self._id(problem), token_ids, problem.answer)

    def _lengths(self, problems: Sequence[Problem]) -> dict[int, int]:
        """Return the lines of the prompts that do not fit, each with its number of tokens. Raise UserError for a chat
        that the template refuses."""
        frame, most = len(self._prompting.encode("x")), self._max_tokens or sys.maxsize
        lengths, seen = dict[int, int](), {tuple[str, ...]()}
        for problem in problems:
            roles = tuple(message["role"] for message in problem.messages)
            if roles not in seen or frame + len(problem.question.encode()) > most:
                seen.add(roles)
                try:
                    lengths[problem.line] = len(self._prompting.encode(problem.question, problem.messages))
                except UserError as error:
                    raise UserError(f"{problem.place}: {error}") from error
        return {line: length for line, length in lengths.items() if length > most}

    def _too_long(self, problem: Problem, length: int) -> UserError:
        return UserError(
            f"{problem.place}: the prompt has {length} tokens, but at most {self._max_tokens} fit; lower "
            "sampling.max_new_tokens"
        )


def split_by_hash(problems: Sequence[Problem], fraction: float, source: str) -> tuple[list[Problem], list[Problem]]:
    """Return problems to train on and problems held out, each in their order: at least one question on either side,
    but with a `fraction` of 1 none to train on."""
    if fraction == 1:
        return [], list(problems)
    ranked = sorted(
        {p.question for p in problems}, key=lambda text: (blake2b(text.encode(), digest_size=8).digest(), text)
    )
    if len(ranked) < 2:
        raise UserError(f"task.path={source} holds {len(ranked)} question: add some, or give task.eval_path")
    held_out = set(ranked[: min(max(1, round(fraction * len(ranked))), len(ranked) - 1)])
    return [p for p in problems if p.question not in held_out], [p for p in problems if p.question in held_out]
