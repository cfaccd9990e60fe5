"""The source of a step's groups: a collector, or a warm-up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from torch import Tensor

from grpo_cli.history import History
from grpo_cli.settings import Sampling
from grpo_cli.types import Batch, Group, LossOutput, Prompt, ScoredGroup, Totals


@runtime_checkable
class StepRollouts(Protocol):
    """The means by which a collector makes one step's groups.

    `n` is the size of a plain group, `prompts` the number of problems of a plain step, `rng` the step's own stream, and
    `version` how many updates the weights have seen, which a `Span` names.
    """

    n: int
    prompts: int
    sampling: Sampling
    step: int
    version: int
    rng: np.random.Generator
    history: History  # of the steps before this one

    @property
    def at_limit(self) -> bool:
        """True if the run has generated `train.max_generated` tokens and ends with this step."""

    @property
    def groups(self) -> Sequence[Group]:
        """All groups so far, in order of their first request, each sorted by sample."""

    def pick(self, count: int, without: Set[str] = frozenset()) -> Sequence[Prompt]:
        """Return `count` problems of the curriculum that are new to this step and whose ids are not in `without`; fewer
        if the task has no more."""

    def generate(
        self, requests: Iterable[tuple[Prompt, int] | Group], *, enough: int | None = None, limit: int | None = None
    ) -> Sequence[Group]:
        """Return the requested groups, with all that the step has of them: of a problem and a number so many more
        rollouts, of a group (also of an earlier step) the rest of its partial ones. Once `enough` of them are whole, or
        a rollout has `limit` tokens, rollouts come back partial."""

    def score(self, groups: Iterable[Group]) -> list[ScoredGroup]:
        """Return the groups' finished rollouts with their rewards; each is judged once."""

    def differs(self, group: ScoredGroup) -> bool:
        """True if the answers that `train.truncated` leaves to train on are not all as good, whatever format adds."""

    def note(self, figure: str, value: int | float) -> None:
        """Record a number as `collect/<figure>`."""


@runtime_checkable
class Collector(Protocol):
    """Returns the groups that a step trains on.

    One that requests more than n * prompts rollouts at a time has a method `at_once(n, prompts)` that returns the most;
    what else it can do is in `support.facts` (unequal, stops, resumes).
    """

    def __call__(self, step: StepRollouts) -> Sequence[ScoredGroup]: ...


@runtime_checkable
class Warmup(Protocol):
    """The first steps of a run, in place of rollouts and rewards."""

    @property
    def steps(self) -> int:
        """Return how many there are."""

    @property
    def rate(self) -> float | None:
        """Their learning rate; None: that of other steps."""

    def groups(self, step: int) -> Sequence[ScoredGroup]:
        """Return what step `step` (from 0) is trained on, whose tokens are given."""

    def loss(self, logprobs: Float[Tensor, "B T"], batch: Batch, totals: Totals) -> LossOutput:
        """Compute the loss, as `interfaces.Loss`."""
