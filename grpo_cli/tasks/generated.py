"""The base of tasks that generate their prompts: `train` is made as it is read, and `eval` is held out of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b
from random import Random
from typing import Annotated, ClassVar, Generic, TypeVar

from pydantic import Field

from grpo_cli.support.errors import UserError
from grpo_cli.tasks.prompting import MadePrompts, TextTask, encode_behind
from grpo_cli.types import Prompt

HELD_OUT_ONE_IN = 8
MOST_TRIES = 10_000  # draws for one more problem of the eval split, before the problems are taken to be exhausted
TrainProblems = Annotated[int, Field(ge=1, le=100_000_000)]  # an order of them is kept: 800 MB
EvalProblems = Annotated[int, Field(ge=1, le=1_000_000)]  # all of them are kept


def is_held_out(problem: str, one_in: int = HELD_OUT_ONE_IN) -> bool:
    """True if a problem belongs to the eval split: a hash of its text decides, so no seed can move it."""
    return int.from_bytes(blake2b(problem.encode(), digest_size=8).digest(), "big") % one_in == 0


P = TypeVar("P")


class GeneratedTask(TextTask, ABC, Generic[P]):
    """Problems of several sizes: the size is uniform in `train`, and `eval` goes through the sizes in turn, so that
    every beginning of it covers them evenly.

    `train` is a function of the seed; `eval` is the same for every seed, no two of its problems are alike, and no
    problem of one split is in the other.
    """

    name: ClassVar[str]
    sizes_are: ClassVar[str]  # "terms", whose settings are min_terms and max_terms

    def _generate(self, seed: int, least: int, most: int, train_problems: int, eval_problems: int) -> None:
        """Make the splits of problems of sizes from `least` to `most`."""
        if least > most:
            raise UserError(f"task.min_{self.sizes_are}={least} must be at most task.max_{self.sizes_are}={most}")
        self._seed, self._sizes = seed, range(least, most + 1)
        self._train = MadePrompts(lambda i: self._prompt(f"train-{i}", *self._to_train(i)), train_problems)
        self._evaluated = self._held_out(eval_problems)
        self._eval = tuple(self._prompt(f"eval-{i}", *found) for i, found in enumerate(self._evaluated))

    @abstractmethod
    def draw(self, rng: Random, size: int) -> P:
        """Return a problem of either split. Its text decides the split."""

    def reference(self, problem: P) -> str:
        """Return what a completion's answer is compared with."""
        return str(problem)

    def question(self, problem: P, rng: Random) -> str:
        """Return the text of its prompt. No two problems of `eval` share it and the reference."""
        return f"{problem}="

    def between(self, turns: Sequence[Sequence[int]], messages: Sequence[str]) -> Sequence[int]:
        """Return the tokens of an observation, in an episode of several turns."""
        return encode_behind(self._prompting.tokenizer, "".join(messages), turns[-1])

    def _problem(self, prompt: Prompt) -> tuple[P, str]:
        """Return the problem that a prompt was made of, and its text."""
        split, _, number = prompt.id.partition("-")
        return self._to_train(int(number)) if split == "train" else self._evaluated[int(number)]

    def _to_train(self, index: int) -> tuple[P, str]:
        """Return problem `index` of the train split and its text: a function of the seed and the index alone."""
        rng = Random(f"{self.name}/train/{self._seed}/{index}")
        size = rng.choice(self._sizes)
        while is_held_out(str(problem := self.draw(rng, size))):
            pass
        return problem, self.question(problem, rng)

    def _held_out(self, count: int) -> list[tuple[P, str]]:
        """Return the problems of the eval split with their texts. Raise UserError if there are too few."""
        rng = Random(f"{self.name}/eval")
        found: dict[tuple[str, str], tuple[P, str]] = {}
        for i in range(count):
            size = self._sizes[i % len(self._sizes)]
            for _ in range(MOST_TRIES):
                problem = self.draw(rng, size)
                if not is_held_out(str(problem)):
                    continue
                question = self.question(problem, rng)
                if (name := (question, self.reference(problem))) not in found:
                    found[name] = problem, question
                    break
            else:
                raise UserError(
                    f"task.eval_problems={count}: only {i} distinct held-out problems were found, no more of {size} "
                    f"{self.sizes_are}; lower it, or allow larger numbers"
                )
        return list(found.values())

    def _prompt(self, prompt_id: str, problem: P, question: str) -> Prompt:
        return Prompt(prompt_id, self._prompting.encode(question), self.reference(problem))
