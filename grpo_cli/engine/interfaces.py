"""Protocols of schedulers and predictors. They read views of the requests and answer; only the engine acts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from grpo_cli.types import Request, Rollout


@dataclass(frozen=True)
class Waiting:
    """A request that waits for a slot: its index in the list given to `generate`, and the predicted number of tokens
    it has yet to generate, None without a prediction."""

    index: int
    prompt_id: str
    max_new_tokens: int
    predicted: float | None


@dataclass(frozen=True)
class Running:
    """A request that runs."""

    index: int
    generated: int
    predicted: float | None


@runtime_checkable
class Scheduler(Protocol):
    """Orders the waiting requests. Schedulers change time, never tokens; where generation stops early (`enough`), they
    decide which requests finish in time."""

    @property
    def needs_lengths(self) -> bool:
        """Whether it is useless without predicted lengths, and so refused with `predictor=none`."""

    @property
    def details(self) -> Mapping[str, float]:
        """Metrics of the plan that was followed; empty when there are none."""

    def start(self, waiting: Sequence[Waiting], slots: int) -> None:
        """A new `generate` begins: forget the previous one and plan ahead if the scheduler does."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free: int) -> Sequence[int]:
        """Return the indices of at most `free` waiting requests, each once, that begin now; at least one when nothing
        is running.

        An admitted request is not shown again. Under a tight `sampler.kv_budget` it may start later than it was
        admitted, but never after a request that was admitted later and needs as much memory.
        """


@runtime_checkable
class Predictor(Protocol):
    """Predicts how many tokens follow a request's first `prefix_tokens`, and learns from finished rollouts."""

    @property
    def prefix_tokens(self) -> int:
        """How many tokens a request must have generated before its length is predicted; 0 predicts before any."""

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        """Remaining tokens after the prefix, one per request, or None when it cannot tell.

        `hidden` is the policy's last hidden state after the prefix, None when `prefix_tokens` is 0.
        """

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> Mapping[str, float]:
        """Learn from one `generate`'s rollouts; returns metrics of the predictions that were used for it.

        Held-out rollouts are excluded, so after an evaluation `finished` is empty and `hidden` None.
        """

    def state(self) -> Mapping[str, Any]:
        """What it has learned, as tensors and plain values, for a checkpoint."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave."""
