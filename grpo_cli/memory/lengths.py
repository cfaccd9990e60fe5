"""The lengths of a profile's rollouts: as the model ends them, or forced, so that random weights give realistic ones.

A forced rollout ends exactly at its length. The longest of all has `sampling.max_new_tokens`, so that the engine
allocates what it would for a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from grpo_cli.collect.resuming import first_seed
from grpo_cli.engine.common import together
from grpo_cli.engine.length_predictor import key_of
from grpo_cli.interfaces import Engine
from grpo_cli.memory.plan import Workload
from grpo_cli.types import EngineStats, Finish, Prompt, Request, Rollout

NEVER = -1  # the end-of-sequence token of a forced rollout: a token that no model produces

Lengths = Callable[[int, int], list[int]]  # (number of rollouts, most tokens of each) -> their lengths


def lognormal(count: int, longest: int, mean: float, cv: float, seed: int) -> list[int]:
    """Return `count` numbers from 1 to `longest`: evenly spaced quantiles of a log-normal distribution with this mean
    and coefficient of variation, shuffled by the seed. A few draws would usually vary less than the distribution."""
    sigma = np.sqrt(np.log1p(cv**2))
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    lengths = np.exp(np.log(mean) - sigma**2 / 2 + sigma * normal)
    shuffled = np.random.default_rng(seed).permutation(np.clip(np.rint(lengths), 1, longest))
    return shuffled.astype(int).tolist()


def forced(kind: str, mean: float | None, cv: float, seed: int) -> Lengths | None:
    """Return the rule of a `profile.lengths`; None for natural ones."""
    if kind == "natural":
        return None

    def lengths(count: int, longest: int) -> list[int]:
        if kind == "full":
            return [longest] * count
        found = lognormal(count, longest, longest / 4 if mean is None else mean, cv, seed)
        found[found.index(max(found))] = longest
        return found

    return lengths


class ProfiledEngine:
    """An engine that forces the lengths of its rollouts (None: leaves them alone) and records what it generates. To
    force lengths, the wrapped engine must have no end-of-sequence token."""

    def __init__(self, engine: Engine, lengths: Lengths | None) -> None:
        self._engine = engine
        self._lengths = lengths
        self._work: dict[Prompt, list[int]] = {}  # lengths of what was made since the last `take`
        self._costs: list[EngineStats] = []
        self._longest = 0
        self._forced: dict[int, int] = {}  # by the seed that a rollout began with

    def generate(
        self, requests: Sequence[Request], enough: Callable[[Rollout], bool] | None = None, **replies: Any
    ) -> Iterator[Rollout]:
        for request in requests:
            self._work.setdefault(request.prompt, [])
        for rollout in self._generate(requests, enough, **replies):
            if len(rollout):  # of what was stopped before it began nothing was made
                self._work[rollout.request.prompt].append(len(rollout))
            yield rollout
        self._longest = max(self._longest, *(request.sampling.max_new_tokens for request in requests))
        self._costs.append(self._engine.stats())

    def take(self) -> tuple[Workload, EngineStats]:
        """Return what was generated since the last `take`, in however many calls, and what it cost."""
        made = {prompt: tuple(lengths) for prompt, lengths in self._work.items() if lengths}
        work = Workload(tuple(len(prompt.token_ids) for prompt in made), tuple(made.values()), self._longest)
        cost = together(self._costs)
        self._work, self._costs, self._longest = {}, [], 0
        return work, cost

    def _generate(
        self, requests: Sequence[Request], enough: Callable[[Rollout], bool] | None, **replies: Any
    ) -> Iterator[Rollout]:
        if self._lengths is None:
            inner: Any = self._engine
            yield from inner.generate(requests, enough, **replies)
            return
        longest = max(request.resumed + request.sampling.max_new_tokens for request in requests)
        fresh = [one for one in requests if not one.resumed or first_seed(one) not in self._forced]
        lengths = self._lengths(len(fresh), longest) if fresh else []
        self._forced |= {first_seed(request): length for request, length in zip(fresh, lengths, strict=True)}
        asked = {key_of(request): request for request in requests}

        def as_asked(rollout: Rollout) -> Rollout:
            request = asked[key_of(rollout.request)]
            if rollout.finish is Finish.PARTIAL:
                return replace(rollout, request=request)
            shorter = request.resumed + len(rollout) < longest
            return replace(rollout, request=request, finish=Finish.EOS if shorter else Finish.LENGTH)

        has_enough = None if enough is None else lambda rollout: enough(as_asked(rollout))
        limited = [
            replace(request, sampling=replace(request.sampling, max_new_tokens=most))
            for request in requests
            for most in [max(1, self._forced[first_seed(request)] - request.resumed)]
        ]
        yield from map(as_asked, self._engine.generate(limited, has_enough))

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def update_weights(self) -> None:
        self._engine.update_weights()

    @property
    def answers_in_place(self) -> bool:
        return getattr(self._engine, "answers_in_place", False)

    @property
    def reads_stop_strings(self) -> bool:
        return self._engine.reads_stop_strings

    def facts(self) -> Mapping[str, Any]:
        return self._engine.facts()

    def state_dict(self) -> Mapping[str, Any]:
        return self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._engine.load_state_dict(state)
