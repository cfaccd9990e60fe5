"""Sums and differences of a few small numbers, worked out on paper: the embedded task; and with a calculator.

A prompt is `12+7-5+30=` and a completion rewrites what is left until one number remains: `19-5+30=14+30=44`. Only that
last number is judged, so a completion may do several operations at once; doing one at a time is longer and safer. The
length of a careful completion grows with the square of the number of terms. Nothing a model writes is ever evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random
from typing import Annotated, TypedDict, Unpack

from pydantic import Field

from grpo_cli.support.errors import UserError
from grpo_cli.tasks.formats import OverlongTokens
from grpo_cli.tasks.generated import EvalProblems, GeneratedTask, TrainProblems
from grpo_cli.tasks.judges import Weighing, Weights
from grpo_cli.tasks.prompting import Prompting, Tokenizer, encode_behind
from grpo_cli.tasks.turns import completed_future
from grpo_cli.types import Finish, Prompt, Reward, Rollout

_LINE = re.compile(r"(0|[1-9][0-9]{0,3})([+-][1-9][0-9]{0,3})*")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,3}")


@dataclass(frozen=True)
class Sum:
    """A sum of signed terms that is worked out from left to right, the first term being non-negative."""

    terms: tuple[int, ...]

    def __str__(self) -> str:
        return str(self.terms[0]) + "".join(f"{term:+d}" for term in self.terms[1:])

    @property
    def answer(self) -> int:
        return sum(self.terms)

    def after(self, operations: int) -> Sum:
        """Return what is left to do after that many operations: `12+7-5` after one is `19-5`."""
        return Sum((sum(self.terms[: operations + 1]), *self.terms[operations + 1 :]))


def draw_sum(rng: Random, num_terms: int, max_operand: int, max_value: int) -> Sum:
    """Draw a number in 1..`max_value`, then operands in 1..`max_operand`; running results stay in 0..`max_value`."""
    terms = [rng.randint(1, max_value)]
    value = terms[0]
    for _ in range(num_terms - 1):
        operand = rng.randint(1, max_operand)
        plus = value - operand < 0 or (value + operand <= max_value and rng.random() < 0.5)
        terms.append(operand if plus else -operand)
        value += terms[-1]
    return Sum(tuple(terms))


def worked_solution(problem: Sum) -> str:
    """Return the completion that does one operation in each line, the longest.

    >>> worked_solution(Sum((12, 7, -5, 30)))
    '19-5+30=14+30=44'
    """
    return "=".join(str(problem.after(count)) for count in range(1, len(problem.terms)))


def last_number(completion: str) -> str | None:
    """Return the number after the last `=` (or all there is), None when it is no plain number."""
    last = completion.rsplit("=", 1)[-1]
    return last if _NUMBER.fullmatch(last) else None


class SumSettings(TypedDict):
    """The settings of the sums, explained in `conf/task/arithmetic.yaml`."""

    min_terms: Annotated[int, Field(ge=2, le=64)]
    max_terms: Annotated[int, Field(ge=2, le=64)]
    max_operand: Annotated[int, Field(ge=1, le=999)]
    max_value: Annotated[int, Field(ge=2, le=9999)]
    train_problems: TrainProblems
    eval_problems: EvalProblems


class Arithmetic(GeneratedTask[Sum]):
    """The task. The reward is 1 for a completion that ended by itself with the right number, else 0; `weights` may name
    parts that look at its form or its length (`judges.py`)."""

    name, sizes_are = "arithmetic", "terms"

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        weights: Weights,
        overlong_tokens: OverlongTokens,
        **sums: Unpack[SumSettings],
    ) -> None:
        operand, value = self._limits = sums["max_operand"], sums["max_value"]
        if value < 2 * operand:
            raise UserError(f"task.max_value={value} must be at least 2 * task.max_operand={2 * operand}")
        self._weighing = Weighing(weights, "all", "correct", overlong_tokens)
        self._prompting = Prompting(tokenizer)  # no template: the model was trained on bare text
        self._generate(seed, sums["min_terms"], sums["max_terms"], sums["train_problems"], sums["eval_problems"])

    def draw(self, rng: Random, size: int) -> Sum:
        return draw_sum(rng, size, *self._limits)

    def reference(self, problem: Sum) -> str:
        return str(problem.answer)

    def solution(self, prompt: Prompt) -> Sequence[int]:
        return encode_behind(self._prompting.tokenizer, worked_solution(self._problem(prompt)[0]), prompt.token_ids)

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        # the last token alone is dropped: another special token inside an answer must spoil it
        completion = self.raw_text(rollout.token_ids[:-1]) if rollout.finish is Finish.EOS else None
        correct = float(completion is not None and last_number(completion) == prompt.answer)
        return self._weighing.reward({"correct": correct}, completion or "", rollout)


class Calculator(Arithmetic):
    """The task `arithmetic` in several turns, with a tool that has to be used, and used rightly.

    A turn that ends with `=` calls the calculator, which appends the value of what stands before it: `123+45-6=`
    becomes `123+45-6=162`. What a model writes is split at signs and added up; what is no sum is answered by `?`. The
    last number of the episode is judged, be it the model's or the calculator's.
    """

    name = "calculator"
    turn_ends = ("=",)

    def __init__(
        self, tokenizer: Tokenizer, seed: int, *, turns: Annotated[int, Field(ge=2)], **sums: Unpack[SumSettings]
    ) -> None:
        super().__init__(tokenizer, seed, weights=None, overlong_tokens=None, **sums)
        self.turns = turns

    def respond(self, prompt: Prompt, turns: Sequence[Sequence[int]]) -> Future[Sequence[str] | None]:
        text = self.text(turns[-1])
        if not text.endswith("="):
            return completed_future(None)
        sum_of = text[:-1].rpartition("=")[2]
        value = str(sum(map(int, re.findall(r"[+-]?[0-9]+", sum_of)))) if _LINE.fullmatch(sum_of) else "?"
        return completed_future([value])
