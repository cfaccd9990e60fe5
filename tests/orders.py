"""Schedulers and a predictor that no run has: they start rollouts in orders that ours never would."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from grpo_cli.engine.length_predictor import NoPredictor
from grpo_cli.engine.scheduling import Fifo, Running, Waiting
from grpo_cli.types import Request, Rollout


class Backwards(Fifo):
    """The last request first: mixes prompts."""

    needs_lengths = True

    def start(self, waiting: Sequence[Waiting], slots: int) -> None:
        pass

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free: int) -> Sequence[int]:
        return [view.index for view in reversed(waiting)][:free]


class PromptsFirst(Backwards):
    """One rollout of every prompt before another one of any: opens as many prompts as it can."""

    def start(self, waiting: Sequence[Waiting], slots: int) -> None:
        names = [view.prompt_id for view in waiting]
        self._rank = {view.index: names[:place].count(view.prompt_id) for place, view in enumerate(waiting)}

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free: int) -> Sequence[int]:
        order = sorted(waiting, key=lambda view: (self._rank[view.index], view.index))
        return [view.index for view in order][:free]


class AnyOrder(Backwards):
    """Any request, and not always as many as it might; relies on its plans being followed."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._left: set[int] = set()

    def start(self, waiting: Sequence[Waiting], slots: int) -> None:
        self._left = {view.index for view in waiting}

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free: int) -> Sequence[int]:
        assert {view.index for view in waiting} == self._left
        assert not self._left & {view.index for view in running}
        some = min(len(waiting), self._random.randint(0 if running else 1, free))
        indices = self._random.sample(sorted(self._left), some)
        self._left -= set(indices)
        return indices


class Forgetful(NoPredictor):
    """Sees two tokens of every rollout and makes its prediction from the sample's number."""

    prefix_tokens = 2

    def predict(self, requests: Sequence[Request], hidden: torch.Tensor | None) -> Sequence[float] | None:
        assert hidden is not None and len(hidden) == len(requests)
        return [float(7 * request.sample % 5 + 1) for request in requests]

    def learn(self, finished: Sequence[Rollout], hidden: torch.Tensor | None) -> Mapping[str, float]:
        assert hidden is not None and len(hidden) == len(finished)
        return {"predictor/kendall_tau": 0.5}
