"""Schedulers and a predictor that no run has: they start rollouts in orders that ours never would."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from grpo_cli.engine.length_predictor import NoPredictor
from grpo_cli.engine.scheduling import Fifo
from grpo_cli.engine.sequence import Sequence
from grpo_cli.types import Request, Rollout


class AnyOrder(Fifo):
    """Any waiting request: mixes prompts."""

    needs_lengths = True

    def start(self, waiting: Seq[Sequence], slots: int, refills: bool) -> None:
        super().start(waiting, slots, refills)
        random.Random(0).shuffle(self._queue)

    def next(self, running: Seq[Sequence]) -> Sequence:
        assert not {*running} & {*self._queue}
        return super().next(running)


class GivenLengths(NoPredictor):
    """Predicts the given lengths."""

    def __init__(self, given: Mapping[Request, float]) -> None:
        self._given = given

    def predict(self, requests: Seq[Request], hidden: torch.Tensor | None) -> Seq[float]:
        return [self._given[request] for request in requests]


class Forgetful(NoPredictor):
    """Sees two tokens of every rollout and makes its prediction from the sample's number."""

    prefix_tokens = 2

    def predict(self, requests: Seq[Request], hidden: torch.Tensor | None) -> Seq[float] | None:
        assert hidden is not None and len(hidden) == len(requests)
        return [float(7 * request.sample % 5 + 1) for request in requests]

    def learn(self, finished: Seq[Rollout], hidden: torch.Tensor | None) -> None:
        assert hidden is not None and len(hidden) == len(finished)
