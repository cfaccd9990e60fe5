"""Every problem once per epoch: the plain curriculum, and the order of candidates for the others."""

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

    An epoch ends if fewer problems are left than asked for, so that none comes twice in a step. Ids of prompts in a
    list or tuple are checked now; other sequences may compute their prompts, which are checked step by step (in
    `requests_for`).
    """

    def __init__(self, prompts: Sequence[Prompt], per_step: int, seed: int) -> None:
        if len(prompts) < per_step:
            raise UserError(
                f"train.prompts={per_step} different prompts a step were asked for, but the task has {len(prompts)}: "
                "lower train.prompts"
            )
        if isinstance(prompts, (list, tuple)):
            check_ids(prompts, "prompts to train on")
        self._prompts, self._per_step, self._seed = prompts, per_step, seed
        self._epoch, self._place = -1, 0
        self._order = np.empty(0, dtype=np.int64)

    def pick(self, step: int, count: int, without: Set[str]) -> list[Prompt]:
        return [self._prompts[index] for index in self.places(step, count, without)]

    def places(self, step: int, count: int, without: Set[str]) -> list[int]:
        """Indices of the next `count` problems in the task's sequence."""
        if count + len(without) > len(self._prompts):
            raise UserError(
                f"step {step + 1} asks for {count + len(without)} different problems, but the task has "
                f"{len(self._prompts)}: lower train.prompts or the rule's pool"
            )
        if self._epoch < 0:  # fresh, or resumed from an old checkpoint without a position
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
