"""One step's rollouts: what its collector requests is numbered, seeded, made, grouped, and judged once."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_cli.collect.requests import score_all, seed_of
from grpo_cli.engine.costs import together
from grpo_cli.errors import UserError
from grpo_cli.history import History
from grpo_cli.interfaces import Collector, Curriculum, Engine, Task
from grpo_cli.settings import Sampling
from grpo_cli.types import EngineStats, Group, Prompt, Request, Rollout, Round, ScoredGroup, Span

MOST_ROUNDS = 1000  # a collector that wants more is taken to have no end


class StepCollection:
    """What a collector is given (see `interfaces.Collection`), and what has come of its rounds.

    `version` is the number of updates that the weights have seen, of which every token that is drawn here is.
    """

    def __init__(
        self,
        *,
        n: int,
        prompts: int,
        sampling: Sampling,
        seed: int,
        step: int,
        curriculum: Curriculum,
        task: Task,
        history: History,
        version: int = 0,
        span: Callable[[str], AbstractContextManager[None]],
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._n, self._prompts, self._step, self._version = n, prompts, step, version
        self._sampling, self._seed = sampling, seed
        self._curriculum, self._task, self._history = curriculum, task, history
        self._span, self._autocast = span, autocast
        self._rng = np.random.default_rng(seed_of(seed, step, "collector"))
        self._picked: dict[str, Prompt] = {}
        self._rollouts: dict[str, dict[int, Rollout]] = {}  # by problem and sample, in the order of the requests
        self._scored: dict[str, ScoredGroup] = {}
        self._notes: dict[str, float] = {}
        self._costs: list[EngineStats] = []
        self.rollout_seconds = 0.0

    @property
    def n(self) -> int:
        return self._n

    @property
    def prompts(self) -> int:
        return self._prompts

    @property
    def step(self) -> int:
        return self._step

    @property
    def rng(self) -> np.random.Generator:
        return self._rng

    @property
    def history(self) -> History:
        return self._history

    def pick(self, count: int) -> Sequence[Prompt]:
        found = self._curriculum.pick(self._step, count, self._picked.keys())
        self._picked |= {prompt.id: prompt for prompt in found}
        return found

    def score(self, groups: Sequence[Group]) -> Sequence[ScoredGroup]:
        lacking = [group for group in groups if self._lacks(group)]
        if lacking:
            with self._span("reward"):
                fresh = score_all(self._task, [self._unjudged(group) for group in lacking])
            for group, new in zip(lacking, fresh, strict=True):
                known = self._scored.get(group.prompt.id, ScoredGroup(group.prompt, (), ()))
                rollouts, rewards = (*known.rollouts, *new.rollouts), (*known.rewards, *new.rewards)
                self._scored[group.prompt.id] = ScoredGroup(group.prompt, rollouts, rewards)
        return [self._scored[group.prompt.id] for group in groups]

    def _lacks(self, group: Group) -> bool:
        known = self._scored.get(group.prompt.id)
        return known is None or len(known.rollouts) < len(group.rollouts)

    def _unjudged(self, group: Group) -> Group:
        """Samples are numbered on, so those that were judged come first."""
        known = self._scored.get(group.prompt.id)
        return Group(group.prompt, group.rollouts[len(known.rollouts) if known else 0 :])

    def note(self, figure: str, value: int | float) -> None:
        self._notes[f"collect/{figure}"] = float(value)

    @property
    def groups(self) -> list[Group]:
        """All so far, in the order in which they were first requested; each by its samples."""
        return [
            Group(self._picked[name], tuple(of[sample] for sample in sorted(of))) for name, of in self._rollouts.items()
        ]

    def run(self, collector: Collector, engine: Engine) -> list[ScoredGroup]:
        """Make what the collector requests until it requests no more; the groups to train on. UserError if it requests
        what cannot be had."""
        rounds: Any = collector(self)
        if not isinstance(rounds, Generator):
            raise UserError(f"the collector is no generator, but a {type(rounds).__name__}: yield its rounds")
        answer = None
        for number in range(MOST_ROUNDS + 1):
            try:
                wanted = rounds.send(answer)
            except StopIteration as end:
                return list(self.score(self._chosen(end.value)))
            requests = self._requests(wanted, number)
            self._make(requests, engine)
            answer = self.groups
        raise UserError(f"the collector has no end: it asked for more than {MOST_ROUNDS} rounds in one step")

    def _requests(self, wanted: Any, number: int) -> list[Request]:
        if not isinstance(wanted, Round):
            kind = type(wanted).__name__
            raise UserError(f"round {number + 1} of the collector is a {kind}: yield Round((GroupRequest(...), ...))")
        if not wanted.requests:
            raise UserError(f"round {number + 1} of the collector is empty: leave it out")
        made: list[Request] = []
        for group in wanted.requests:
            name = group.prompt.id
            if self._picked.get(name) != group.prompt:
                raise UserError(
                    f"round {number + 1} of the collector names problem {name!r}, which this step has not picked: take "
                    "problems from collection.pick(...)"
                )
            if group.count < 1:
                raise UserError(
                    f"round {number + 1} of the collector asks for {group.count} rollouts of problem {name!r}: 1 is "
                    "the least, and a problem that is to have none is left out"
                )
            first = len(self._rollouts.get(name, {})) + sum(request.prompt.id == name for request in made)
            made += [
                Request(group.prompt, sample, seed_of(self._seed, self._step, name, sample), self._sampling)
                for sample in range(first, first + group.count)
            ]
        return made

    def _make(self, requests: Sequence[Request], engine: Engine) -> None:
        for request in requests:
            self._rollouts.setdefault(request.prompt.id, {})
        start = time.perf_counter()
        with self._span("rollout"), self._autocast():
            for rollout in engine.generate(requests):
                of_problem = self._rollouts[rollout.request.prompt.id]
                of_problem[rollout.request.sample] = replace(rollout, spans=(Span(self._version, len(rollout)),))
        self.rollout_seconds += time.perf_counter() - start
        self._costs.append(engine.stats())

    def _chosen(self, names: Sequence[str] | None) -> list[Group]:
        if not self._rollouts:
            raise UserError("the collector ended without a round: it has to yield at least one")
        if names is None:
            return self.groups
        unknown = [name for name in names if name not in self._rollouts]
        if unknown or not names:
            found = f"problem {unknown[0]!r}, of which it has requested nothing" if unknown else "no problem"
            raise UserError(f"the collector returned {found}: return the ids of what to train on, or None for all")
        return [group for group in self.groups if group.prompt.id in set(names)]

    @property
    def stats(self) -> EngineStats:
        """What all rounds cost together."""
        return together(self._costs)

    def metrics(self) -> dict[str, float]:
        """How much was requested, and what the collector has noted."""
        sizes = [len(of) for of in self._rollouts.values()]
        return {
            "collect/rounds": float(len(self._costs)),
            "collect/problems": float(len(sizes)),
            "collect/rollouts_min": float(min(sizes)),
            "collect/rollouts_max": float(max(sizes)),
            **self._notes,
        }
