"""What the groups of a step come from: a collector, or a warm-up."""

from __future__ import annotations

from collections.abc import Generator, Sequence, Set
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from torch import Tensor

from grpo_cli.history import History
from grpo_cli.types import Batch, Group, LossOutput, Prompt, Round, ScoredGroup, Totals


@runtime_checkable
class Collection(Protocol):
    """What a collector may use while it collects one step's rollouts.

    `n` is the size of a plain group and `prompts` how many problems a plain step has; `rng` is the step's own stream.
    `max_new_tokens` are the most that a rollout has.
    `version` is how many updates the weights have seen, which is what a `Span` says of the tokens drawn now.
    """

    n: int
    prompts: int
    max_new_tokens: int
    step: int
    version: int
    rng: np.random.Generator
    history: History  # of the steps before this one

    @property
    def at_limit(self) -> bool:
        """Whether the run has generated `train.max_generated` tokens and ends with this step: no further round is
        worth its tokens."""

    def pick(self, count: int, without: Set[str] = frozenset()) -> Sequence[Prompt]:
        """`count` problems of the curriculum, none of which this step has picked or resumed before, nor one whose id is
        in `without`."""

    def score(self, groups: Sequence[Group]) -> Sequence[ScoredGroup]:
        """Judge the finished rollouts; each is judged only once, however often this is called."""

    def teaches(self, group: ScoredGroup) -> bool:
        """True if the group's answers are not all as good, whatever format or length add, and some rollout that
        `train.truncated` does not leave out would have an advantage. What a correction will reject is not known yet."""

    def note(self, figure: str, value: int | float) -> None:
        """A number for the record, as `collect/<figure>`."""


# A collector yields rounds, and is sent all groups so far, in the order in which they were first requested. It returns
# the ids of the problems that the step trains on, whose rollouts are all at their end by then; None: all.
Rounds = Generator[Round, Sequence[Group], Sequence[str] | None]


@runtime_checkable
class Collector(Protocol):
    """How a step's rollouts are collected: how many of which problem, in how many rounds."""

    def __call__(self, collection: Collection) -> Rounds: ...


@runtime_checkable
class Warmup(Protocol):
    """What the first steps of a run are made of, in place of rollouts and rewards."""

    @property
    def steps(self) -> int:
        """How many there are."""

    @property
    def rate(self) -> float | None:
        """Their learning rate; None: that of other steps."""

    def groups(self, step: int) -> Sequence[ScoredGroup]:
        """What step `step` (from 0) is trained on, whose tokens are given."""

    def loss(self, logprobs: Float[Tensor, "B T"], batch: Batch, totals: Totals) -> LossOutput:
        """As `interfaces.LossFn`."""
