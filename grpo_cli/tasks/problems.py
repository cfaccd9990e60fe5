"""Problems of a data set: read with their answers, split, and made into prompts one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

from grpo_cli.support.errors import UserError
from grpo_cli.tasks.judges import Judge
from grpo_cli.tasks.prompting import MadePrompts, Prompting
from grpo_cli.tasks.rows import Problem, of_json, read_rows, where
from grpo_cli.types import Prompt

LONG_PROMPTS = ("refuse", "leave_out", "cut")


class LazyPrompts(MadePrompts):
    """Problems as prompts, tokenised one at a time on demand: a large file costs little at start-up.

    Only those that might be too long, judging by their bytes, are tokenised at once, so that a prompt that does not fit
    is found before any step is taken: it is refused, left out or cut (its beginning goes), the latter two with a
    warning. (A prompt that is too long for another reason, a tokenizer that makes more tokens than bytes or what an
    environment `opens` an episode with, is noticed when it gets there, and refused unless cut.)
    """

    def __init__(
        self,
        split: str,
        problems: Sequence[Problem],
        prompting: Prompting,
        max_tokens: int | None,
        long_prompts: str,
        warn: Callable[[str], None],
        opens: Callable[[Mapping[str, Any], str], str] = lambda row, place: "",
    ) -> None:
        assert len({p.line for p in problems}) == len(problems), "a problem of a split has a line of its own"
        self._split, self._prompting, self._max_tokens, self._opens = split, prompting, max_tokens, opens
        self._cut = long_prompts == "cut"
        self._rehearse(problems)
        too_long = self._too_long(problems)
        self.problems = problems if self._cut else [p for p in problems if p.line not in too_long]
        if too_long:
            first = next(problem for problem in problems if problem.line in too_long)
            if long_prompts == "refuse":
                raise self._refusal(first, too_long[first.line], len(too_long))
            warn(
                f"{len(too_long)} of the {len(problems)} prompts of {split} have more than {max_tokens} tokens and "
                f"{'lose their beginning' if self._cut else 'are left out'} (task.long_prompts={long_prompts}); the "
                f"first: {first.place}"
            )
        if not self.problems:
            raise UserError(f"no prompt to {split} on is left: all have more than {max_tokens} tokens")
        super().__init__(lambda place: self._prompt(self.problems[place]), len(self.problems))

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The index of each prompt by its id; no prompt is made for it."""
        return {self._id(problem): place for place, problem in enumerate(self.problems)}

    def of(self, prompt_id: str) -> Problem:
        """The problem that a prompt was made of."""
        return self.problems[self.places[prompt_id]]

    def _id(self, problem: Problem) -> str:
        return f"{self._split}-{problem.line:06d}"

    def _prompt(self, problem: Problem) -> Prompt:
        token_ids = self._encode(problem)
        if self._max_tokens is not None and len(token_ids) > self._max_tokens:
            if not self._cut:
                raise self._refusal(problem, len(token_ids), count=1)
            token_ids = token_ids[len(token_ids) - self._max_tokens :]
        return Prompt(self._id(problem), token_ids, problem.answer)

    def _encode(self, problem: Problem) -> tuple[int, ...]:
        """The question, followed by the environment's opening text, as in TRL."""
        said, messages = self._opens(of_json(problem.row), problem.place), problem.messages
        if said and messages:
            messages = (*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + said})
        return self._prompting.encode(problem.question + said, messages)

    def _rehearse(self, problems: Sequence[Problem]) -> None:
        """Of questions that are chats one for each order of roles: a template that refuses it, or a setting that does
        not go with it, is found at once."""
        chats = [problem for problem in reversed(problems) if problem.messages]
        for problem in {tuple(message["role"] for message in chat.messages): chat for chat in chats}.values():
            try:
                self._prompting.encode(problem.question, problem.messages)
            except UserError as error:
                raise UserError(f"{problem.place}: {error}") from error

    def _too_long(self, problems: Sequence[Problem]) -> dict[int, int]:
        """The lines of the prompts that do not fit, each with its number of tokens.

        Of a question with more characters than the tokens that fit could have, only so many are tokenised: all of 10 MB
        takes half a minute.
        """
        frame = len(self._prompting.encode("x"))  # also a rehearsal of the chat template
        most = self._max_tokens
        if most is None:
            return {}
        suspects = [p for p in problems if frame + len(p.question.encode()) > most]
        characters = most * max(map(len, self._prompting.tokenizer.get_vocab())) + 1 if suspects else 0
        lengths = {p.line: len(self._prompting.encode(p.question[:characters], p.messages)) for p in suspects}
        return {line: length for line, length in lengths.items() if length > most}

    def _refusal(self, problem: Problem, length: int, count: int) -> UserError:
        others = f" (and {count - 1} more like it)" if count > 1 else ""
        return UserError(
            f"{problem.place}: the prompt has {length} tokens{others}, but at most {self._max_tokens} fit; shorten or "
            "remove it, lower sampling.max_new_tokens, choose a model with a longer context, or set "
            "task.long_prompts=leave_out or cut"
        )


class Reader:
    """Reads sources into problems, each source once.

    `judge` reads the answer of a field, or finds none. Up to `max_unreadable` (a share) of the rows may have an answer
    that cannot be read; they are left out with a warning. More is a UserError.
    """

    def __init__(
        self, judge: Judge, question_field: str, answer_field: str, max_unreadable: float, warn: Callable[[str], None]
    ) -> None:
        self._judge, self._fields = judge, (question_field, answer_field)
        self._max_unreadable, self._warn = max_unreadable, warn
        self._read: dict[str, list[Problem]] = {}

    def read(self, source: str, key: str = "task.path") -> list[Problem]:
        """The source's problems. `key` is the setting that names it, for messages."""
        if source not in self._read:
            rows = read_rows(source, key, *self._fields)
            self._warn_of_repeated_ids(rows, source)
            answers = [self._judge.gold(row.answer) for row in rows]
            if unreadable := [row for row, answer in zip(rows, answers, strict=True) if answer is None]:
                self._complain(unreadable, len(rows))
            pairs = zip(rows, answers, strict=True)
            self._read[source] = [replace(row, answer=answer) for row, answer in pairs if answer is not None]
        return self._read[source]

    def _warn_of_repeated_ids(self, rows: Sequence[Problem], source: str) -> None:
        """Rows that share an `id` of their own are kept as different prompts, as a prompt's id is its line.

        Published data sets list a problem once for each of its solutions, so this is no error; but copies in other
        words may end on both sides of a split, which goes by the question.
        """
        first: dict[str, int] = {}
        repeated = []
        for row in rows if self._fields[1] != "id" else ():
            name = _own_id(row.row)
            if name and first.setdefault(name, row.line) != row.line:
                repeated.append((name, row))
        if repeated:
            name, row = repeated[0]
            others = f" (and {len(repeated) - 1} more of {len(rows)} rows repeat an id)" if len(repeated) > 1 else ""
            self._warn(
                f"{row.place} has the id {_shortened(name)}, as {where(source, first[name]).rpartition(', ')[2]} has"
                f"{others}; they are different prompts here, known by their lines: remove any that are copies"
            )

    def _complain(self, bad: Sequence[Problem], count: int) -> None:
        others = f" (and {len(bad) - 1} more of {count} rows)" if len(bad) > 1 else ""
        fault = (
            f"{bad[0].place}{others}: no answer was understood in the field {self._fields[1]!r}: "
            f"{_shortened(bad[0].answer)!r}"
        )
        if len(bad) > self._max_unreadable * count:
            raise UserError(
                f"{fault}; {self._judge.advice}. At most task.max_unreadable={self._max_unreadable:g} of the rows may "
                "be unreadable"
            )
        self._warn(f"{fault}; {'such rows are' if others else 'the row is'} left out")


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


def _own_id(row: Mapping[str, Any]) -> str:
    """The row's `id` field as JSON; empty if it has none, or a blank one."""
    value = row.get("id")
    if value is None or (isinstance(value, str) and not value.strip()):
        return ""
    return json.dumps(value, default=str, sort_keys=True, ensure_ascii=False)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


def _shortened(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else f"...{text[-limit:]}"
