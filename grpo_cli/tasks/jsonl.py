"""Word problems with a number for an answer, from a JSONL file of one's own or the hub.

The judge compares final answers (see `answers.py`); it runs nothing and knows no algebra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from typing import overload

from grpo_cli.errors import UserError
from grpo_cli.tasks.answers import equal, extract_answer, gold_answer
from grpo_cli.tasks.prompting import Prompting, Tokenizer
from grpo_cli.tasks.rows import Row, read_rows, where
from grpo_cli.types import Prompt, Reward, Rollout

GRADINGS = {"lenient": "correct", "strict": "correct_strict"}


@dataclass(frozen=True)
class Problem:
    """A question with its answer as a number. `line` and `place` say where it came from."""

    line: int
    place: str
    question: str
    answer: Fraction


class Jsonl:
    """The task. A prompt's id is its split and its line in the file, as in `train-000012`.

    With `eval_path` that file is the eval split, and no question may be in both. Without, the `eval_fraction` of the
    questions with the smallest hashes is held out: the same for every seed, and copies of a question stay together.
    The rewards `correct` and `correct_strict` are 1 or 0; `grading` (lenient or strict) says which is trained on.
    Prompts are tokenised when asked for, but none longer than `max_prompt_tokens` gets past the start.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        path: str,
        eval_path: str | None = None,
        question_field: str = "question",
        answer_field: str = "answer",
        system_prompt: str | None = None,
        template: str = "Question: {question}\nAnswer:",
        use_chat_template: bool = True,
        eval_fraction: float = 0.05,
        grading: str = "lenient",
        max_prompt_tokens: int | None = None,
    ) -> None:
        del seed  # nothing here is random: runs that differ in their seed share their problems
        _check(eval_fraction, grading)
        self._prompting = Prompting(tokenizer, template, system_prompt, use_chat_template)
        self._total = GRADINGS[grading]
        fields = (question_field, answer_field)
        train = understood(read_rows(path, "task.path", *fields), path, answer_field)
        if eval_path is None:
            train, held_out = split_by_hash(train, eval_fraction, path)
        else:
            held_out = understood(read_rows(eval_path, "task.eval_path", *fields), eval_path, answer_field)
            _check_disjoint(train, held_out, path, eval_path)
        self._splits = {
            split: LazyPrompts(split, problems, self._prompting, max_prompt_tokens)
            for split, problems in (("train", train), ("eval", held_out))
        }

    def prompts(self, split: str) -> Sequence[Prompt]:
        if split not in self._splits:
            raise UserError(f"the task was asked for the split {split!r}; it has {' and '.join(self._splits)}")
        return self._splits[split]

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        found = extract_answer(self.text(rollout.token_ids))
        correct = equal(found.value, Fraction(prompt.answer))
        parts = {"correct": float(correct), "correct_strict": float(correct and found.strict)}
        return Reward(parts[self._total], parts)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._prompting.decode(token_ids)


class LazyPrompts(Sequence[Prompt]):
    """Problems as prompts, tokenised one at a time when asked for: a large file costs little at start-up.

    Only those that might be too long, judging by their bytes, are tokenised at once, so that a prompt that does not fit
    is refused before any step is taken. (A tokenizer that makes more tokens than bytes is refused when it gets there.)
    """

    def __init__(self, split: str, problems: Sequence[Problem], prompting: Prompting, max_tokens: int | None) -> None:
        self._split = split
        self._problems = problems
        self._prompting = prompting
        self._max_tokens = max_tokens
        self._check_lengths()

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self._prompt(problem) for problem in self._problems[index]]
        return self._prompt(self._problems[index])

    def _prompt(self, problem: Problem) -> Prompt:
        token_ids = self._prompting.encode(problem.question)
        if self._max_tokens is not None and len(token_ids) > self._max_tokens:
            raise self._too_long(problem, len(token_ids), count=1)
        return Prompt(f"{self._split}-{problem.line:06d}", token_ids, str(problem.answer))

    def _check_lengths(self) -> None:
        frame = len(self._prompting.encode("x"))  # also a rehearsal of the chat template
        if self._max_tokens is None:
            return
        suspects = [p for p in self._problems if frame + len(p.question.encode()) > self._max_tokens]
        lengths = [(p, len(self._prompting.encode(p.question))) for p in suspects]
        too_long = [(p, length) for p, length in lengths if length > self._max_tokens]
        if too_long:
            raise self._too_long(*too_long[0], len(too_long))

    def _too_long(self, problem: Problem, num_tokens: int, count: int) -> UserError:
        others = f" (and {count - 1} more like it)" if count > 1 else ""
        return UserError(
            f"{problem.place}: the prompt has {num_tokens} tokens{others}, but at most {self._max_tokens} fit; shorten "
            "or remove it, lower sampling.max_new_tokens, or take a model with a longer context"
        )


def understood(rows: Sequence[Row], source: str, answer_field: str) -> list[Problem]:
    """Rows with their answers as numbers; those that cannot be read as one are counted and refused together."""
    problems, bad = [], []
    for row in rows:
        answer = gold_answer(row.answer)
        if answer is None:
            bad.append(row)
        else:
            problems.append(Problem(row.number, where(source, row.number), row.question, answer))
    if bad:
        others = f" (and {len(bad) - 1} more of {len(rows)} rows)" if len(bad) > 1 else ""
        raise UserError(
            f"{where(source, bad[0].number)}{others}: no number was understood in the field {answer_field!r}: "
            f"{_shortened(bad[0].answer)!r}; end it with '#### 42', or let it be a number"
        )
    return problems


def split_by_hash(problems: Sequence[Problem], fraction: float, source: str) -> tuple[list[Problem], list[Problem]]:
    """Problems to train on and problems held out, each in their order: at least one question on either side."""
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


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


def _shortened(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else f"...{text[-limit:]}"


def _check(eval_fraction: float, grading: str) -> None:
    problems = []
    if not 0 < eval_fraction < 1:
        problems.append(f"task.eval_fraction={eval_fraction} must lie between 0 and 1, both excluded")
    if grading not in GRADINGS:
        problems.append(f"task.grading={grading} must be one of {', '.join(GRADINGS)}")
    if problems:
        raise UserError("\n".join(problems))


def _check_disjoint(train: Sequence[Problem], held_out: Sequence[Problem], path: str, eval_path: str) -> None:
    places = {problem.question: problem.place for problem in train}
    shared = [problem for problem in held_out if problem.question in places]
    if shared:
        raise UserError(
            f"{len(shared)} of the {len(held_out)} questions of task.eval_path={eval_path} are also in task.path={path}"
            f" (the first: {shared[0].place} is {places[shared[0].question]}); "
            "remove them from one of the two, or leave task.eval_path=null to hold out a share"
        )
