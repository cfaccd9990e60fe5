"""A Bernoulli bank: problems that are solved by chance, so that real steps of rollouts run without a model.

Problem q is solved with the chance 1 / (1 + exp(difficulty - ability)); difficulties are drawn from N(0, 4^2), and what
a policy would learn is that ability grows by `drift` times the share of a step's groups that are mixed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import numpy as np
from small import FakeEngine

from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.equal import equal
from grpo_cli.history import History
from grpo_cli.interfaces import Collector, Curriculum
from grpo_cli.settings import Sampling
from grpo_cli.types import Finish, Prompt, Request, Reward, Rollout, ScoredGroup

SAMPLING = Sampling.plain(1)


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
            yield Rollout(request, (right,), (-1.0,), Finish.EOS, 0)

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
            groups = self._collection(step).run(self._collector, self.bank)
            self.history.observe(step, groups)
            self.metrics.append(dict(self.curriculum.observe(step, groups)))  # type: ignore[attr-defined]
            self.bank.learn(groups)
            self.mixed.append(mixed(groups))
            self.picked.append([group.prompt.id for group in groups])
            self.sizes.append({group.prompt.id: len(group.rollouts) for group in groups})
        return self

    def _collection(self, step: int) -> StepCollection:
        return StepCollection(
            n=self._n,
            prompts=self._prompts,
            sampling=SAMPLING,
            seed=self._seed,
            step=step,
            curriculum=self.curriculum,
            task=self.bank,
            history=self.history,
            span=lambda name: nullcontext(),
        )


def group_of(prompt: Prompt, solved: int, tried: int = 8) -> ScoredGroup:
    """As if `tried` rollouts had been made and the first `solved` of them were right."""
    requests = [Request(prompt, sample, sample, SAMPLING) for sample in range(tried)]
    rollouts = tuple(Rollout(request, (0,), (-1.0,), Finish.EOS, 0) for request in requests)
    return ScoredGroup(prompt, rollouts, tuple(Reward(float(sample < solved)) for sample in range(tried)))


def problems(count: int) -> list[Prompt]:
    return [Prompt(f"q{i}", (i,), "") for i in range(count)]
