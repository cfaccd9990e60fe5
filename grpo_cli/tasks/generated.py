"""What tasks with generated problems share: a train split that is made as it is read, and who is held out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import overload

from grpo_cli.types import Prompt

HELD_OUT_ONE_IN = 8
MOST_TRAIN, MOST_EVAL = 100_000_000, 1_000_000  # an order of the former is kept (800 MB), and all of the latter


def count_problems(train: int, evaluated: int) -> Iterator[str]:
    """What is wrong with the numbers of problems to train on and to evaluate on."""
    for key, count, most in (("train", train, MOST_TRAIN), ("eval", evaluated, MOST_EVAL)):
        if not 1 <= count <= most:
            few = f"task.{key}_problems={count} must be at least 1"
            yield few if count < 1 else f"{few} and at most {most}: they take memory from the start"


def is_held_out(problem: str) -> bool:
    """Whether a problem belongs to the eval split: a hash of its text decides, so no seed can move it."""
    digest = blake2b(problem.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class GeneratedPrompts(Sequence[Prompt]):
    """`size` prompts, each made by `make(index)` when it is asked for: a million of them cost nothing."""

    make: Callable[[int], Prompt]
    size: int

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(f"prompt {index} of {self.size}")
        return self.make(index % self.size)
