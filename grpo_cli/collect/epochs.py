"""Every prompt once per epoch: the plain curriculum, and the order of candidates for others, which learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from grpo_cli.collect.requests import check_ids, seed_of
from grpo_cli.history import of_kind
from grpo_cli.support.errors import UserError
from grpo_cli.types import Prompt, ScoredGroup


class Epochs:
    """A new order every epoch, a function of (seed, epoch), and a position in it.

    An epoch ends if fewer prompts are left than are picked, so that none comes twice in a step. Ids of a list or tuple
    are checked now; other sequences may compute their prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], per_step: int, seed: int) -> None:
        if len(prompts) < per_step:
            raise UserError(f"train.prompts={per_step} is more than the task's {len(prompts)} prompts: lower it")
        if isinstance(prompts, (list, tuple)):
            check_ids(prompts, "prompts to train on")
        self._prompts, self._per_step, self._seed = prompts, per_step, seed
        self._epoch, self._place = -1, 0
        self._order = np.empty(0, dtype=np.int64)

    def pick(self, step: int, count: int, without: Set[str]) -> list[Prompt]:
        return [self._prompts[index] for index in self.places(step, count, without)]

    def places(self, step: int, count: int, without: Set[str]) -> list[int]:
        """Return the indices of the next `count` prompts in the task's sequence."""
        if count + len(without) > len(self._prompts):
            raise UserError(
                f"step {step + 1} picks {count + len(without)} different prompts, but the task has "
                f"{len(self._prompts)}: lower train.prompts or the rule's pool"
            )
        if self._epoch < 0:
            epoch, steps = divmod(step, len(self._prompts) // self._per_step)
            self._turn_to(epoch, steps * self._per_step)
        if self._place + count > len(self._order):
            self._turn_to(self._epoch + 1, 0)
        chosen: list[int] = []
        while len(chosen) < count:
            if self._place == len(self._order):  # the others were in `without`
                self._turn_to(self._epoch + 1, 0)
            index = int(self._order[self._place])
            self._place += 1
            if index not in chosen and not (without and self._prompts[index].id in without):
                chosen.append(index)
        return chosen

    def _turn_to(self, epoch: int, place: int) -> None:
        self._order = np.random.default_rng(seed_of(self._seed, "epoch", epoch)).permutation(len(self._prompts))
        self._epoch, self._place = epoch, place

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "epochs", "epoch": self._epoch, "place": self._place}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if state is not None and (state := of_kind(state, "curriculum", "epochs"))["epoch"] >= 0:
            self._turn_to(state["epoch"], state["place"])


class CandidateOrder(Epochs):
    """The next `pool` times as many prompts as needed, in the order of epochs; all if there are fewer."""

    def __init__(self, prompts: Sequence[Prompt], per_step: int, seed: int, pool: int) -> None:
        super().__init__(prompts, per_step, seed)
        self._pool = pool

    def places(self, step: int, count: int, without: Set[str]) -> list[int]:
        """Return their indices in the task's sequence. UserError if fewer than `count` are left."""
        left, wanted = len(self._prompts) - len(without), self._pool * count
        if not count <= left <= wanted:
            return super().places(step, min(wanted, max(left, count)), without)
        every = range(len(self._prompts))
        return [place for place in every if not (without and self._prompts[place].id in without)]


def require_revisits(name: str, prompts: int, per_step: int, steps: int) -> None:
    """Raise UserError if the task's prompts are visited less than once on average."""
    visits = steps * per_step
    if visits < prompts:
        raise UserError(
            f"curriculum={name} learns from earlier visits, but train.steps={steps} of train.prompts={per_step} visit "
            f"{prompts} prompts {visits} times: raise train.steps, or use curriculum=epochs"
        )
