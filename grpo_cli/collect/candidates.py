"""Shared by curricula that learn from visits: the candidates of a step, and a check of settings."""

from __future__ import annotations

from collections.abc import Sequence, Set

from grpo_cli.collect.epochs import Epochs
from grpo_cli.history import History
from grpo_cli.support.errors import UserError
from grpo_cli.types import Prompt


class CandidateOrder(Epochs):
    """The next `pool` times as many problems as needed, in the order of epochs; all if there are fewer."""

    def __init__(self, prompts: Sequence[Prompt], per_step: int, seed: int, pool: int) -> None:
        super().__init__(prompts, per_step, seed)
        self._pool = pool

    def places(self, step: int, count: int, without: Set[str]) -> list[int]:
        """Their indices in the task's sequence. UserError if fewer than `count` are left."""
        left, wanted = len(self._prompts) - len(without), self._pool * count
        if not count <= left <= wanted:
            return super().places(step, min(wanted, max(left, count)), without)
        every = range(len(self._prompts))
        return [place for place in every if not (without and self._prompts[place].id in without)]


def require_revisits(name: str, prompts: int, per_step: int, steps: int, history: History) -> None:
    """UserError if the task's problems are visited less than once on average."""
    visits = steps * per_step
    if visits < prompts:
        fitting = max(per_step, visits // 4)
        raise UserError(
            f"curriculum={name} learns from earlier visits of a problem, but train.steps={steps} of "
            f"train.prompts={per_step} visit the task's {prompts} problems {visits} times in all: give the task fewer "
            f"(such as task.train_problems={fitting}), raise train.steps, or take curriculum=epochs"
        )
