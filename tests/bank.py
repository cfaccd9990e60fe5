"""Real steps of rollouts without a model: scripted ones, and a Bernoulli bank of problems that are solved by chance.

Of the bank, problem q is solved with the chance 1 / (1 + exp(difficulty - ability)); difficulties are drawn from
N(0, 4^2), and what a policy would learn is that ability grows by `drift` times the share of a step's groups that are
mixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from small import FakeEngine

from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.equal import equal
from grpo_cli.history import History
from grpo_cli.interfaces import Collector, Curriculum
from grpo_cli.settings import Sampling
from grpo_cli.types import EngineStats, Finish, Prompt, Request, Reward, Rollout, ScoredGroup

SAMPLING = Sampling.plain(1)


def collection_of(
    engine: Any,
    curriculum: Curriculum,
    *,
    n: int,
    prompts: int,
    sampling: Sampling = SAMPLING,
    seed: int = 0,
    step: int = 0,
    history: History | None = None,
    version: int = 0,
    **more: Any,
) -> StepCollection:
    """A step's, of an engine that is its task as well."""
    return StepCollection(
        n=n,
        prompts=prompts,
        sampling=sampling,
        seed=seed,
        step=step,
        curriculum=curriculum,
        engine=engine,
        task=engine,
        history=History() if history is None else history,
        version=version,
        **more,
    )


class Scripted(FakeEngine):
    """Rollouts of one token that are right or wrong as `solves` has it. The last comes first, as engines may do."""

    def __init__(self, solves: Callable[[Request], bool] = lambda request: False) -> None:
        self.solves = solves
        self.rounds: list[list[Request]] = []
        self.judged: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        self.rounds.append(list(requests))
        yield from (Rollout(request, (0,), (-1.0,), Finish.EOS) for request in reversed(requests))

    def prompts(self, split: str) -> Sequence[Prompt]:
        return []

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        self.judged.append(rollout.request)
        return Reward(float(self.solves(rollout.request)))

    def text(self, token_ids: Sequence[int]) -> str:
        return ""

    def stats(self) -> EngineStats:
        return EngineStats(decode_steps=1, generated_tokens=len(self.rounds[-1]), slots=1, slot_utilisation=1.0)


class Bank(FakeEngine):
    """The engine and the task at once: whether a rollout is right is decided by its request's seed."""

    def __init__(self, problems: int, seed: int = 0, drift: float = 0.02) -> None:
        self.difficulty = np.random.default_rng(seed).normal(0, 4, problems)
        self.ability, self._drift = 0.0, drift
        self.problems = [Prompt(f"q{i}", (i,), "") for i in range(problems)]

    def prompts(self, split: str) -> Sequence[Prompt]:
        return self.problems

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def chance(self, prompt: Prompt) -> float:
        return 1 / (1 + math.exp(self.difficulty[prompt.token_ids[0]] - self.ability))

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        for request in requests:
            right = int(request.seed / 2**64 < self.chance(request.prompt))
            yield Rollout(request, (right,), (-1.0,), Finish.EOS)

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return Reward(float(rollout.token_ids[0]))

    def learn(self, groups: Sequence[ScoredGroup]) -> None:
        self.ability += self._drift * mixed(groups)


def mixed(groups: Sequence[ScoredGroup]) -> float:
    """The share of groups that are solved by some of their rollouts and not by others."""
    return float(np.mean([0 < group.solved < len(group.rollouts) for group in groups]))


class BankRun:
    """Steps of a run on a bank: what they picked, made and were told, and no update but the bank's own."""

    def __init__(
        self,
        bank: Bank,
        curriculum: Curriculum,
        history: History,
        *,
        prompts: int,
        n: int,
        seed: int = 0,
        collector: Collector = equal,
    ) -> None:
        self.bank, self.curriculum, self.history, self._collector = bank, curriculum, history, collector
        self._prompts, self._n, self._seed = prompts, n, seed
        self.mixed: list[float] = []
        self.picked: list[list[str]] = []
        self.sizes: list[dict[str, int]] = []
        self.metrics: list[dict[str, float]] = []

    def steps(self, steps: range) -> BankRun:
        for step in steps:
            collection = collection_of(
                self.bank,
                self.curriculum,
                n=self._n,
                prompts=self._prompts,
                seed=self._seed,
                step=step,
                history=self.history,
            )
            groups = collection.run(self._collector)
            self.history.observe(step, groups)
            self.metrics.append(dict(self.curriculum.observe(step, groups)))  # type: ignore[attr-defined]
            self.bank.learn(groups)
            self.mixed.append(mixed(groups))
            self.picked.append([group.prompt.id for group in groups])
            self.sizes.append({group.prompt.id: len(group.rollouts) for group in groups})
        return self


def group_of(prompt: Prompt, solved: int, tried: int = 8) -> ScoredGroup:
    """As if `tried` rollouts had been made and the first `solved` of them were right."""
    requests = [Request(prompt, sample, sample, SAMPLING) for sample in range(tried)]
    rollouts = tuple(Rollout(request, (0,), (-1.0,), Finish.EOS) for request in requests)
    return ScoredGroup(prompt, rollouts, tuple(Reward(float(sample < solved)) for sample in range(tried)))


def problems(count: int) -> list[Prompt]:
    return [Prompt(f"q{i}", (i,), "") for i in range(count)]


class InOrder:
    """The problems as they are, once."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def pick(self, step: int, count: int, without: Any) -> Sequence[Prompt]:
        return [prompt for prompt in self._prompts if prompt.id not in without][:count]
