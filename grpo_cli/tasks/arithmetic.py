"""Sums and differences of a few small numbers, worked out on paper: the embedded task.

A prompt is `12+7-5+30=` and a completion rewrites what is left until one number remains: `19-5+30=14+30=44`. Only that
last number is judged, so a completion may do several operations at once; doing one at a time is longer and safer. The
length of a careful completion grows with the square of the number of terms. Nothing a model writes is ever evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import Range
from grpo_cli.tasks.formats import OverlongTokens, overlong
from grpo_cli.tasks.generated import EvalProblems, GeneratedTask, TrainProblems
from grpo_cli.tasks.judges import Weighing
from grpo_cli.tasks.prompting import Tokenizer, Verbatim
from grpo_cli.types import Prompt, Reward, Rollout

_LINE = re.compile(r"(0|[1-9][0-9]{0,3})([+-][1-9][0-9]{0,3})*")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,3}")


@dataclass(frozen=True)
class Sum:
    """A sum of signed terms that is worked out from left to right, the first term being non-negative."""

    terms: tuple[int, ...]

    def __str__(self) -> str:
        return str(self.terms[0]) + "".join(f"{term:+d}" for term in self.terms[1:])

    def after(self, operations: int) -> Sum:
        """What is left to do after that many operations: `12+7-5` after one is `19-5`."""
        return Sum((sum(self.terms[: operations + 1]), *self.terms[operations + 1 :]))


def draw_sum(rng: Random, num_terms: int, max_operand: int, max_value: int) -> Sum:
    """A number in 1..`max_value`, then operands in 1..`max_operand`; running results stay within 0..`max_value`."""
    terms = [rng.randint(1, max_value)]
    value = terms[0]
    for _ in range(num_terms - 1):
        operand = rng.randint(1, max_operand)
        if value - operand < 0 or (value + operand <= max_value and rng.random() < 0.5):
            terms.append(operand)
        else:
            terms.append(-operand)
        value += terms[-1]
    return Sum(tuple(terms))


def worked_solution(problem: Sum, operations: Sequence[int] | None = None) -> str:
    """The completion that does `operations[i]` operations in line i; by default one at a time, which is the longest.

    >>> worked_solution(Sum((12, 7, -5, 30)))
    '19-5+30=14+30=44'
    >>> worked_solution(Sum((12, 7, -5, 30)), (2, 1))
    '14+30=44'
    """
    lines = []
    for count in operations if operations is not None else (1,) * (len(problem.terms) - 1):
        problem = problem.after(count)
        lines.append(str(problem))
    if len(problem.terms) != 1:
        raise ValueError(f"the operations leave {problem} undone")
    return "=".join(lines)


def final_answer(completion: str) -> str | None:
    """The number after the last `=` (or all there is), None when it is no plain number without leading zeros."""
    last = completion.rsplit("=", 1)[-1]
    return last if _NUMBER.fullmatch(last) else None


def is_sum(line: str) -> bool:
    """Whether it is a sum of whole numbers of up to four digits, or one of them."""
    return _LINE.fullmatch(line) is not None


def is_well_formed(completion: str) -> bool:
    """Whether the completion is lines of sums joined by `=`, the last of them a plain number."""
    return final_answer(completion) is not None and all(map(is_sum, completion.split("=")))


class Arithmetic(GeneratedTask[Sum]):
    """The task. The reward is 1 for a completion that ended by itself with the right number, else 0; `weights` may name
    parts that look at its form or its length (`formats.py`)."""

    name, sizes_are, makes_more = "arithmetic", "terms", "max_operand"

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        min_terms: Annotated[int, Range(2, 64)],
        max_terms: Annotated[int, Range(2, 64)],
        max_operand: Annotated[int, Range(1, 999)],
        max_value: Annotated[int, Range(2, 9999)],
        train_problems: TrainProblems,
        eval_problems: EvalProblems,
        weights: Mapping[str, Any] | None,
        overlong_tokens: OverlongTokens,
    ) -> None:
        if max_value < 2 * max_operand:
            raise UserError(f"task.max_value={max_value} must be at least 2 * task.max_operand={2 * max_operand}")
        self._weighing = Weighing(weights or {}, "all", "correct")
        self._overlong_tokens = overlong_tokens
        self._verbatim = Verbatim(tokenizer)
        self._max_operand, self._max_value = max_operand, max_value
        super().__init__(self._verbatim, seed, min_terms, max_terms, train_problems, eval_problems)

    def draw(self, rng: Random, size: int) -> Sum:
        return draw_sum(rng, size, self._max_operand, self._max_value)

    def answer(self, problem: Sum) -> str:
        return str(sum(problem.terms))

    def shown(self, prompt: Prompt) -> Sequence[int]:
        return self._verbatim.goes_on(prompt, worked_solution(self._asked(prompt)[0]))

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        completion = self._verbatim.completion(rollout)
        correct = float(completion is not None and final_answer(completion) == prompt.answer)
        parts = {"correct": correct, "well_formed": float(completion is not None and is_well_formed(completion))}
        return self._weighing.reward(parts, completion or "", overlong(rollout, self._overlong_tokens))
