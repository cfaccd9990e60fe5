"""Guess a number: episodes of several turns that the embedded model can learn, and can only win by using the answers.

The prompt says where the number is, `8+7=` for one of the 15 from 8 to 8 + 2 * 7, and a turn is a number. A wrong guess
is answered by the range that is left, and what is no number of the range by the same range again. Whoever works out the
sum guesses the middle, and so finds one of 2^k - 1 numbers in k turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random
from typing import Annotated

from pydantic import Field

from grpo_cli.support.errors import UserError
from grpo_cli.tasks.arithmetic import last_number
from grpo_cli.tasks.generated import EvalProblems, GeneratedTask, TrainProblems
from grpo_cli.tasks.prompting import Prompting, Tokenizer
from grpo_cli.tasks.turns import completed_future
from grpo_cli.types import Prompt, Reward, Rollout


@dataclass(frozen=True)
class Hidden:
    """A number between two others, or one of them."""

    low: int
    high: int
    number: int

    def __str__(self) -> str:
        return f"{self.number}:{self.low}:{self.high}"

    @property
    def range(self) -> str:
        return f"{self.low}+{(self.high - self.low) // 2}="

    def after(self, guess: int | None) -> Hidden:
        """Return what is left after a wrong guess.

        >>> Hidden(0, 15, 9).after(6), Hidden(0, 15, 9).after(12), Hidden(0, 15, 9).after(16)
        (Hidden(low=7, high=15, number=9), Hidden(low=0, high=11, number=9), Hidden(low=0, high=15, number=9))
        """
        if guess is None or not self.low <= guess <= self.high:
            return self
        low, high = (guess + 1, self.high) if guess < self.number else (self.low, guess - 1)
        return Hidden(low, high, self.number)


class Guess(GeneratedTask[Hidden]):
    """The task. The reward is 1 for an episode in which the number was named, else 0."""

    name, sizes_are = "guess", "numbers"
    turn_ends = ()

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        min_numbers: Annotated[int, Field(ge=2)],
        max_numbers: Annotated[int, Field(ge=2, le=999)],
        max_value: Annotated[int, Field(ge=2, le=9999)],
        turns: Annotated[int, Field(ge=2)],
        train_problems: TrainProblems,
        eval_problems: EvalProblems,
    ) -> None:
        if max_numbers > max_value + 1:
            raise UserError(f"task.max_numbers={max_numbers} numbers are not in 0 to task.max_value={max_value}")
        self._prompting, self.turns, self._max_value = Prompting(tokenizer), turns, max_value
        self._generate(seed, min_numbers, max_numbers, train_problems, eval_problems)

    def draw(self, rng: Random, size: int) -> Hidden:
        low = rng.randrange(self._max_value - size + 2)
        return Hidden(low, low + size - 1, low + rng.randrange(size))

    def question(self, problem: Hidden, rng: Random) -> str:
        return problem.range

    def respond(self, prompt: Prompt, turns: Sequence[Sequence[int]]) -> Future[Sequence[str] | None]:
        left, found = self._played(prompt, turns)
        return completed_future(None if found else [f",{left.range}"])

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        found = float(self._played(prompt, rollout.turns)[1])
        return Reward(found, {"correct": found}, weights={"correct": 1.0})

    def _played(self, prompt: Prompt, turns: Sequence[Sequence[int]]) -> tuple[Hidden, bool]:
        """Return what is left after these turns, and whether one of them has named the number."""
        number, low, high = map(int, prompt.answer.split(":"))
        left = Hidden(low, high, number)
        for turn in turns:
            guess = last_number(self.text(turn))
            if guess == str(number):
                return left, True
            left = left.after(None if guess is None else int(guess))
        return left, False
