"""Problems of a data set: read with their answers, split, and made into prompts one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

from grpo_cli.support.errors import UserError
from grpo_cli.tasks.prompting import MadePrompts, Prompting
from grpo_cli.tasks.rows import Row, where
from grpo_cli.types import Prompt

LONG_PROMPTS = ("refuse", "leave_out", "cut")


@dataclass(frozen=True)
class Problem:
    """A question with its answer as the judge reads it. `line` and `place` say where it came from."""

    line: int
    place: str
    question: str
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)  # all fields, for a reward function


class LazyPrompts(MadePrompts):
    """Problems as prompts, tokenised one at a time when asked for: a large file costs little at start-up.

    Only those that might be too long, judging by their bytes, are tokenised at once, so that a prompt that does not fit
    is dealt with before any step is taken: refused, left out or cut (its beginning goes), the latter two with a
    warning. Of those, what has more characters than the tokens that fit could have is too long without being tokenised.
    (A tokenizer that makes more tokens than bytes is noticed when it gets there, and refused unless cut.)
    """

    def __init__(
        self,
        split: str,
        problems: Sequence[Problem],
        prompting: Prompting,
        max_tokens: int | None,
        long_prompts: str,
        warn: Callable[[str], None],
    ) -> None:
        assert len({problem.line for problem in problems}) == len(problems), (
            "a problem of a split has a line of its own"
        )
        self._split = split
        self._prompting = prompting
        self._max_tokens = max_tokens
        self._cut = long_prompts == "cut"
        too_long = self._too_long(problems)
        self.problems = problems if self._cut else [p for p in problems if p.line not in too_long]
        if too_long and long_prompts == "refuse":
            line, count = next(iter(too_long.items()))
            raise self._refusal(next(p for p in problems if p.line == line), count, len(too_long))
        if too_long:
            done = "lose their beginning" if self._cut else "are left out"
            warn(
                f"{len(too_long)} of the {len(problems)} prompts to {split} on have more than {max_tokens} tokens and "
                f"{done} (task.long_prompts={long_prompts}); the first: {where_of(problems, next(iter(too_long)))}"
            )
        if not self.problems:
            raise UserError(f"no prompt to {split} on is left: all have more than {max_tokens} tokens")
        super().__init__(lambda place: self._prompt(self.problems[place]), len(self.problems))

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Where the prompt of each id is, none of which is made for it."""
        return {self._id(problem): place for place, problem in enumerate(self.problems)}

    def _id(self, problem: Problem) -> str:
        return f"{self._split}-{problem.line:06d}"

    def of(self, prompt_id: str) -> Problem:
        """The problem that a prompt was made of."""
        if not self._by_line:
            self._by_line = {problem.line: problem for problem in self.problems}
        return self._by_line[int(prompt_id.rpartition("-")[2])]

    _by_line: Mapping[int, Problem] = {}

    def _prompt(self, problem: Problem) -> Prompt:
        token_ids = self._prompting.encode(problem.question)
        if self._max_tokens is not None and len(token_ids) > self._max_tokens:
            if not self._cut:
                raise self._refusal(problem, f"{len(token_ids)} tokens", count=1)
            token_ids = token_ids[len(token_ids) - self._max_tokens :]
        return Prompt(self._id(problem), token_ids, problem.answer)

    def _too_long(self, problems: Sequence[Problem]) -> dict[int, str]:
        """The lines of the prompts that do not fit, each with its number of tokens."""
        frame = len(self._prompting.encode("x"))  # also a rehearsal of the chat template
        if self._max_tokens is None:
            return {}
        suspects = [p for p in problems if frame + len(p.question.encode()) > self._max_tokens]
        longest = max(map(len, self._prompting.tokenizer.get_vocab())) if suspects else 0
        found: dict[int, str] = {}
        for problem in suspects:
            if (characters := len(problem.question)) > longest * self._max_tokens:
                found[problem.line] = (
                    f"more than {self._max_tokens} tokens ({characters} characters, of which none of the vocabulary's "
                    f"tokens has more than {longest})"
                )
            elif (length := len(self._prompting.encode(problem.question))) > self._max_tokens:
                found[problem.line] = f"{length} tokens"
        return found

    def _refusal(self, problem: Problem, length: str, count: int) -> UserError:
        others = f" (and {count - 1} more like it)" if count > 1 else ""
        return UserError(
            f"{problem.place}: the prompt has {length}{others}, but at most {self._max_tokens} fit; shorten "
            "or remove it, lower sampling.max_new_tokens, take a model with a longer context, or say what to do with "
            "such prompts: task.long_prompts=leave_out or cut"
        )


def where_of(problems: Sequence[Problem], line: int) -> str:
    return next(problem.place for problem in problems if problem.line == line)


@dataclass(frozen=True)
class Reading:
    """How rows become problems. `read` makes an answer of a field, or None; `advice` says how to write one.

    Up to `max_unreadable` (a share) of the rows may have an answer that cannot be read; they are left out with a
    warning. More is an error.
    """

    read: Callable[[str], str | None]
    advice: str
    answer_field: str
    max_unreadable: float
    warn: Callable[[str], None]

    def problems(self, rows: Sequence[Row], source: str) -> list[Problem]:
        self._warn_of_repeated_ids(rows, source)
        problems, bad = [], []
        for row in rows:
            answer = self.read(row.answer)
            if answer is None:
                bad.append(row)
            else:
                problems.append(Problem(row.number, where(source, row.number), row.question, answer, row.record))
        if bad:
            self._complain(bad, len(rows), source)
        return problems

    def _warn_of_repeated_ids(self, rows: Sequence[Row], source: str) -> None:
        """Rows that a data set itself calls the same are served all the same, as a prompt's id is its line.

        Not refused: published data sets list a problem once for each of its solutions. Not passed over in silence
        either: copies in other words may end on both sides of a split, which goes by the question.
        """
        first: dict[str, int] = {}
        repeated = []
        for row in rows if self.answer_field != "id" else ():
            name = _own_id(row.record)
            if name and first.setdefault(name, row.number) != row.number:
                repeated.append((name, row.number))
        if repeated:
            name, number = repeated[0]
            others = f" (and {len(repeated) - 1} more of {len(rows)} rows repeat an id)" if len(repeated) > 1 else ""
            before = where(source, first[name]).rpartition(", ")[2]
            self.warn(
                f"{where(source, number)} has the id {_shortened(name)}, as {before} has{others}; they are different "
                "prompts here, known by their places: remove those that are copies"
            )

    def _complain(self, bad: Sequence[Row], count: int, source: str) -> None:
        others = f" (and {len(bad) - 1} more of {count} rows)" if len(bad) > 1 else ""
        fault = (
            f"{where(source, bad[0].number)}{others}: no answer was understood in the field {self.answer_field!r}: "
            f"{_shortened(bad[0].answer)!r}"
        )
        if len(bad) > self.max_unreadable * count:
            raise UserError(
                f"{fault}; {self.advice}. At most task.max_unreadable={self.max_unreadable:g} of the rows may be so"
            )
        self.warn(f"{fault}; {'such rows are' if others else 'the row is'} left out")


def split_by_hash(problems: Sequence[Problem], fraction: float, source: str) -> tuple[list[Problem], list[Problem]]:
    """Problems to train on and problems held out, each in their order: at least one question on either side.

    With a `fraction` of 1 all are held out and none is left to train on.
    """
    if fraction == 1:
        return [], list(problems)
    ranked = sorted({problem.question for problem in problems}, key=lambda text: (_digest(text), text))
    if len(ranked) < 2:
        raise UserError(
            f"task.path={source} holds {len(ranked)} question, and none is left to hold out for evaluation; "
            "add questions, or give task.eval_path"
        )
    count = min(max(1, round(fraction * len(ranked))), len(ranked) - 1)
    held_out = set(ranked[:count])
    train = [problem for problem in problems if problem.question not in held_out]
    return train, [problem for problem in problems if problem.question in held_out]


def check_disjoint(train: Sequence[Problem], held_out: Sequence[Problem], path: str, eval_path: str) -> None:
    """No question may be both trained on (or shown as an example) and evaluated on."""
    places = {problem.question: problem.place for problem in train}
    shared = [problem for problem in held_out if problem.question in places]
    if shared:
        raise UserError(
            f"{len(shared)} of the {len(held_out)} questions of task.eval_path={eval_path} are also in {path} "
            f"(the first: {shared[0].place} is {places[shared[0].question]}); "
            "remove them from one of the two, or leave task.eval_path=null to hold out a share"
        )


def _own_id(record: Mapping[str, Any]) -> str:
    """What a row calls itself, as JSON; nothing if it has no `id`, or one that says nothing."""
    value = record.get("id")
    if value is None or (isinstance(value, str) and not value.strip()):
        return ""
    return json.dumps(value, default=str, sort_keys=True, ensure_ascii=False)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


def _shortened(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else f"...{text[-limit:]}"
