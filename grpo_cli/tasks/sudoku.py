"""Sudoku of 4 x 4: fill a grid so that each row, column and quarter has 1 to 4. A prompt is `1..4/..../.1../...3=`, a
completion is `1324/4231/3142/2413`.

Every problem has one solution, so that a reply is judged by comparing texts. Nothing a model writes is ever evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from random import Random
from typing import Annotated

from grpo_cli.support.ranges import Range
from grpo_cli.tasks.generated import EvalProblems, GeneratedTask, TrainProblems
from grpo_cli.tasks.prompting import Tokenizer, Verbatim
from grpo_cli.types import Prompt, Reward, Rollout

SIDE, CELLS = 4, 16
Empty = Annotated[int, Range(1, 12, "with fewer than 4 numbers given there are several solutions")]
_GRID = re.compile(r"[1-4]{4}(?:/[1-4]{4}){3}")


@dataclass(frozen=True)
class Puzzle:
    """The cells row by row, `.` for an empty one, and the one grid that fills them."""

    cells: str
    solution: str

    def __str__(self) -> str:
        return in_rows(self.cells)


def in_rows(cells: str) -> str:
    return "/".join(cells[start : start + SIDE] for start in range(0, CELLS, SIDE))


@cache
def grids() -> tuple[str, ...]:
    """All 288 of them, cell by cell: of two rows that fill two quarters, two such halves whose columns differ."""
    rows = ["".join(one) for one in permutations("1234")]
    halves = [one + other for one in rows for other in rows if not set(one[:2]) & set(other[:2])]
    pairs = product(halves, repeat=2)
    return tuple(a + b for a, b in pairs if all(len({*a[i::SIDE], *b[i::SIDE]}) == SIDE for i in range(SIDE)))


@cache
def _others(solution: str) -> tuple[int, ...]:
    """Of each other grid where it differs, as bits."""
    return tuple(sum((a != b) << i for i, (a, b) in enumerate(zip(solution, o, strict=True))) for o in grids())


def draw_puzzle(rng: Random, empty: int) -> Puzzle:
    """A grid of which `empty` cells are emptied, one after the other, wherever that leaves one solution: no other grid
    differs in empty cells alone."""
    while True:
        solution, gone = rng.choice(grids()), 0
        others = [bits for bits in _others(solution) if bits]
        for place in rng.sample(range(CELLS), CELLS):
            if all(bits & ~(gone | 1 << place) for bits in others):
                gone |= 1 << place
            if gone.bit_count() == empty:
                cells = "".join("." if gone >> i & 1 else cell for i, cell in enumerate(solution))
                return Puzzle(cells, solution)


class Sudoku(GeneratedTask[Puzzle]):
    """The task. The reward is 1 for a completion that ended by itself and is the filled grid, else 0. The grids that
    solve problems of one split solve none of the other."""

    name, sizes_are, makes_more = "sudoku", "empty", "max_empty"

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        min_empty: Empty,
        max_empty: Empty,
        train_problems: TrainProblems,
        eval_problems: EvalProblems,
    ) -> None:
        self._verbatim = Verbatim(tokenizer)
        super().__init__(self._verbatim, seed, min_empty, max_empty, train_problems, eval_problems)

    def draw(self, rng: Random, size: int) -> Puzzle:
        return draw_puzzle(rng, size)

    def key(self, problem: Puzzle) -> str:
        return problem.solution

    def distinct_by(self, problem: Puzzle, question: str) -> str:
        return question

    def answer(self, problem: Puzzle) -> str:
        return in_rows(problem.solution)

    def shown(self, prompt: Prompt) -> Sequence[int]:
        return self._verbatim.goes_on(prompt, prompt.answer)

    def reads(self, rollout: Rollout) -> str | None:
        completion = self._verbatim.completion(rollout)
        return completion if completion is not None and _GRID.fullmatch(completion) else None

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        said = self.reads(rollout)
        parts = {"correct": float(said == prompt.answer), "well_formed": float(said is not None)}
        return Reward(parts["correct"], parts, weights={"correct": 1.0})
