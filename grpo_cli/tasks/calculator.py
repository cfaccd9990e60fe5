"""Sums that the embedded model gets wrong, with a calculator at hand: a tool that has to be used, and used rightly.

The prompt is a sum, `123+45-6=`. A turn that ends with `=` asks the calculator for what stands before it, which it
writes behind: `123+45-6=` becomes `123+45-6=162`. Whatever the model writes is split at signs and added up, and never
evaluated; what is no sum is answered by `?`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Annotated

from grpo_cli.support.ranges import Range
from grpo_cli.tasks.arithmetic import Arithmetic, is_sum
from grpo_cli.tasks.generated import EvalProblems, TrainProblems
from grpo_cli.tasks.prompting import Tokenizer, going_on
from grpo_cli.tasks.turns import answer
from grpo_cli.types import Prompt


class Calculator(Arithmetic):
    """The task: `arithmetic` in several turns. The reward is the same, for the last number of the episode, be it the
    model's or the calculator's."""

    name = "calculator"
    turn_ends = ("=",)

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        min_terms: Annotated[int, Range(2, 64)],
        max_terms: Annotated[int, Range(2, 64)],
        max_operand: Annotated[int, Range(1, 999)],
        max_value: Annotated[int, Range(2, 9999)],
        turns: Annotated[int, Range(2, because="the calculator answers after the first")],
        train_problems: TrainProblems,
        eval_problems: EvalProblems,
    ) -> None:
        sizes = {"min_terms": min_terms, "max_terms": max_terms, "max_operand": max_operand, "max_value": max_value}
        problems = {"train_problems": train_problems, "eval_problems": eval_problems}
        super().__init__(tokenizer, seed, **sizes, **problems, weights=None, overlong_tokens=None)
        self.turns = turns

    def respond(self, prompt: Prompt, turns: Sequence[Sequence[int]]) -> Future[Sequence[str] | None]:
        said = self.text(turns[-1])
        if not said.endswith("="):
            return answer(None)
        sum_of = said[:-1].rpartition("=")[2]
        return answer([str(sum(map(int, re.findall(r"[+-]?[0-9]+", sum_of)))) if is_sum(sum_of) else "?"])

    def between(self, turns: Sequence[Sequence[int]], said: Sequence[str]) -> Sequence[int]:
        return going_on(self._verbatim.tokenizer, "".join(said), turns[-1])
