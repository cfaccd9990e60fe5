"""Real steps of rollouts without a model: scripted ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from small import FakeEngine

from grpo_cli.collect.collection import StepCollection
from grpo_cli.history import History
from grpo_cli.interfaces import Curriculum
from grpo_cli.settings import Sampling
from grpo_cli.types import EngineStats, Finish, Prompt, Request, Reward, Rollout, ScoredGroup

SAMPLING = Sampling.plain(1)


def collection_of(engine: Any, curriculum: Curriculum, **words: Any) -> StepCollection:
    """A step's, of an engine that is its task as well; `n` and `prompts` are needed."""
    words = {"sampling": SAMPLING, "seed": 0, "step": 0, "version": 0, "history": History()} | words
    return StepCollection(curriculum=curriculum, engine=engine, task=engine, **words)


class Scripted(FakeEngine):
    """Rollouts of one token, or `reply`, right or wrong as `solves` has it. The last comes first, as engines may do."""

    def __init__(self, solves: Callable[[Request], bool] = lambda request: False) -> None:
        self.solves, self.reply = solves, (0,)
        self.rounds: list[list[Request]] = []
        self.judged: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        self.rounds.append(list(requests))
        yield from (Rollout(one, self.reply, (-1.0,) * len(self.reply), Finish.EOS) for one in reversed(requests))

    def prompts(self, split: str) -> Sequence[Prompt]:
        return []

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        self.judged.append(rollout.request)
        return Reward(float(self.solves(rollout.request)))

    def text(self, token_ids: Sequence[int]) -> str:
        return ""

    def stats(self) -> EngineStats:
        return EngineStats(decode_steps=1, generated_tokens=len(self.rounds[-1]), slots=1, slot_utilisation=1.0)


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
