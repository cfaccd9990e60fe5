"""The interface of each part that the trainer uses, and the parts of a run together.

A part is a function or a small class, chosen by a YAML file. A rule may also be `SetUp` and `Observes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.history import History
from grpo_cli.settings import Sampling
from grpo_cli.support.facts import facts as facts
from grpo_cli.support.meter import Meter
from grpo_cli.types import (
    Batch,
    EngineStats,
    Group,
    LossOutput,
    Prompt,
    Record,
    Request,
    Reward,
    Rollout,
    ScoredGroup,
    Totals,
    Verdict,
)


@runtime_checkable
class Task(Protocol):
    """Problems and their judge. A task holds the tokenizer; nothing else turns text into tokens or back. With a method
    `raw_text(token_ids)`, which keeps special tokens, records show what the model read."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        """Return the prompts of `train` or `eval`, disjoint, each with its own id, always in the same order."""

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        """Judge one rollout. Must not execute anything that the model wrote."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Return what a judge reads of these tokens: their text without the token that ended it."""


@runtime_checkable
class BatchTask(Task, Protocol):
    def rewards(self, pairs: Sequence[tuple[Prompt, Rollout]]) -> Sequence[Reward]:
        """Return one reward for each prompt and rollout, in their order: cheaper than one by one."""


@runtime_checkable
class KnowsSolutions(Task, Protocol):
    def solution(self, prompt: Prompt) -> Sequence[int]:
        """Return the tokens of a right completion to imitate, without the end of its turn."""


@runtime_checkable
class HasMetrics(Task, Protocol):
    def take_metrics(self) -> Mapping[str, float]:
        """Return what judging took since the last call: metrics by their full names."""


@runtime_checkable
class Dialogue(Task, Protocol):
    """A task of episodes: the model and its environment take turns, until one of them ends it. The environment's
    answers are a pure function of the prompt and the model's turns, so that no environment is ever stored."""

    turns: int  # the most of the model; with 1 there is no dialogue
    turn_ends: Sequence[str]  # strings that end a turn besides `sampling.stop`

    def respond(self, prompt: Prompt, turns: Sequence[Sequence[int]]) -> Future[Sequence[str] | None]:
        """Return the environment's messages after these turns, None if the episode is over. Each turn is token ids as
        they were sampled, with the token or stop string that ended it. The future always ends."""

    def between(self, turns: Sequence[Sequence[int]], messages: Sequence[str]) -> Sequence[int]:
        """Return the tokens of these messages, from the end of the last turn to the next one's begin: at least one."""


@runtime_checkable
class EnvironmentAnswers(Protocol):
    def ask(self, rollout: Rollout) -> int:
        """Request the answer to a rollout's turn, which is over, while its row waits; return the answer's number."""

    def answers(self, wait: bool) -> Sequence[tuple[int, tuple[int, ...] | None]]:
        """Return new answers: numbers, and tokens or None where the episode is over. With `wait` at least one."""


@runtime_checkable
class Stateful(Protocol):
    """A part whose state is in each checkpoint, such as a tracker whose files belong to the run."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return plain values and tensors, none of which changes later, to resume exactly; a rule adds its `kind`."""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned; None if the checkpoint has nothing. UserError if it cannot continue."""


@runtime_checkable
class Engine(Stateful, Protocol):
    """Rollouts of requests, each returned exactly once, in order of finishing."""

    reads_stop_strings: bool  # a rollout ends at one of `sampling.stop`; if not, stop strings are refused

    def generate(
        self, requests: Sequence[Request], enough: Callable[[Rollout], bool] | None = None
    ) -> Iterator[Rollout]:
        """Yield one rollout per request. `enough` is called once with each that ends, until it returns True: then the
        others come back with `Finish.PARTIAL` and their tokens so far."""

    def stats(self) -> EngineStats:
        """Return the cost of the last `generate`; complete once its iterator is exhausted."""

    def update_weights(self) -> None:
        """Take the weights of a step whose updates moved them; a no-op where the modules are the trainer's."""

    def facts(self) -> Mapping[str, Any]:
        """Return what `summary.json` records of the engine."""


@runtime_checkable
class Curriculum(Protocol):
    def pick(self, step: int, count: int, without: Set[str]) -> Sequence[Prompt]:
        """Return `count` different prompts for step `step` (from 0), none whose id is in `without`."""


@runtime_checkable
class SetUp(Protocol):
    def setup(self, runtime: Runtime) -> None:
        """Take what a rule needs of its run (the model, the task, the history), once, before the first step."""


@runtime_checkable
class Observes(Stateful, Protocol):
    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Learn from a step's groups, a rule from those that the collector returned; return metrics by full names."""


@runtime_checkable
class StepRollouts(Protocol):
    """The means by which a collector makes one step's groups."""

    n: int  # rollouts of a plain group
    prompts: int  # of a plain step
    sampling: Sampling
    step: int
    version: int  # updates that the weights have seen, which a `Span` names
    rng: np.random.Generator  # of this step
    history: History  # of the steps before this one

    @property
    def at_limit(self) -> bool:
        """True if the run has generated `train.max_generated` tokens and ends with this step."""

    @property
    def groups(self) -> Sequence[Group]:
        """All groups so far, in order of their first request, each sorted by sample."""

    def pick(self, count: int, without: Set[str] = frozenset()) -> Sequence[Prompt]:
        """Return `count` prompts of the curriculum that are new to this step and whose ids are not in `without`; fewer
        if the task has no more."""

    def generate(
        self, requests: Iterable[tuple[Prompt, int] | Group], *, enough: int | None = None, limit: int | None = None
    ) -> Sequence[Group]:
        """Return the requested groups, with all that the step has of them: as many new rollouts of a prompt as are
        requested, or the rest of a group's partial ones, which stay partial once `enough` groups are whole, or
        (not both) at `limit` tokens each."""

    def score(self, groups: Iterable[Group]) -> list[ScoredGroup]:
        """Return the groups' finished rollouts with their rewards; each is judged once."""

    def differs(self, group: ScoredGroup) -> bool:
        """True if correctness, without parts for format, differs among the rollouts that `train.truncated` keeps."""

    def note(self, figure: str, value: int | float) -> None:
        """Record a number as `collect/<figure>`."""


@runtime_checkable
class Collector(Protocol):
    def __call__(self, step: StepRollouts) -> Sequence[ScoredGroup]:
        """Return the groups that a step trains on. A collector that requests more than n * prompts rollouts at a time
        has a method `at_once(n, prompts)` that returns the most."""


@runtime_checkable
class Downsample(Protocol):
    def __call__(self, group: ScoredGroup, keep: int, rng: np.random.Generator) -> Sequence[int]:
        """Return `keep` distinct indices into a larger group: the rollouts that are trained on; fewer with
        `keeps_fewer`. `rng` is the group's own stream (seed, step, prompt)."""


@runtime_checkable
class Advantage(Protocol):
    def __call__(self, group: ScoredGroup, kept: Sequence[int]) -> Float[Tensor, "K *T"]:
        """Return the advantages of a group's kept rollouts (indices into it): [K], or [K, T] to weigh tokens, with T
        the length of the longest of them. The group has the rollouts that count in its statistics."""


@runtime_checkable
class Correction(Protocol):
    """Sampler/policy mismatch: importance weights and the tokens left to train on, from xi = policy / sampler.

    Called once in a step, on the rollouts that are trained on; if it `rejects` on all, with advantages of 0. The
    mismatch is measured in any case, of the tokens of `batch.sampled_mask`.
    """

    needs_old_logprobs: bool  # weights or mask depend on xi; if not, the learner's own forward pass may come first
    rejects: bool  # it can take whole rollouts out, so that it must be called before rollouts are chosen
    count_rejected: bool  # rejected rollouts count in their group's reward statistics
    prox: str  # the old policy: step_start, sampler, or ewma, an average of weights (`learner.old_policy`)
    prox_window: float | int  # of ewma's average, in updates

    def __call__(self, batch: Batch, old_logprobs: Float[Tensor, "N"]) -> Verdict: ...


@runtime_checkable
class Loss(Protocol):
    """Log-probabilities to a scalar. Divisors come from `totals`, so micro-batching cannot change the sum. Called where
    `batch.loss_mask` leaves a token. A plain function may have `needs_reference` as an attribute; with a true
    `needs_advantage`, groups whose advantages are all 0 have no backward pass."""

    needs_reference: bool  # it reads `batch.ref_logprobs`, for which the run keeps the model as it was at the start

    def __call__(self, logprobs: Float[Tensor, "N"], batch: Batch, totals: Totals) -> LossOutput: ...


@runtime_checkable
class Tracker(Protocol):
    def log(self, record: Record) -> None:
        """Keep a record."""
        return

    def close(self, summary: Mapping[str, Any]) -> None:
        """End, once, however the run ended; `summary` is the content of `summary.json`."""
        return


@runtime_checkable
class Search(Protocol):
    def __call__(
        self, runtime: Runtime, prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> tuple[Sequence[Rollout], Mapping[str, float]] | None:
        """Return one whole rollout for each prompt, in their order, made of several replies without their rewards, and
        metrics of what they cost; None: no search."""


@dataclass(frozen=True)
class Warmup:
    """The first `steps` of a run, which need no rollouts."""

    steps: int
    rate: float | None  # the learning rate; None: that of other steps
    groups: Callable[[int], Sequence[ScoredGroup]]  # what a step, from 0, is trained on
    loss: Callable[[Tensor, Batch, Totals], LossOutput]


@dataclass(frozen=True)
class Rules:
    """The functions of a step, from the first request to the loss."""

    collector: Collector
    downsample: Downsample
    advantage: Advantage
    correction: Correction
    loss: Loss


@dataclass(frozen=True)
class Runtime:
    device: torch.device
    model: Any
    tokenizer: Any
    task: Task
    engine: Engine
    ends: tuple[int, ...] = ()  # tokens that end a reply
    history: History = field(default_factory=History)


@dataclass(frozen=True)
class Parts:
    """All the parts of a run. `reference` is None without a KL term, and the model itself if it lies below adapters."""

    runtime: Runtime
    curriculum: Curriculum
    rules: Rules
    reference: Any | None
    save_model: Callable[..., None]  # into a folder; with `state_dict` that in place of the model's own
    trackers: tuple[Tracker, ...]
    meter: Meter
    say: Callable[[str], None]
    warn: Callable[[str], None]
    warmup: Warmup | None = None
