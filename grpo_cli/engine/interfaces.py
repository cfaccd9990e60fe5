"""What a scheduler and a predictor must do inside the torch engine. They read views and answer; the engine acts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from grpo_cli.types import Request, Rollout


@dataclass(frozen=True)
class Waiting:
    """A request that waits for a slot. `index` is its place in the list given to `generate`.

    `predicted` is the predicted number of tokens still to be made, None when there is no predictor.
    """

    index: int
    prompt_id: str
    max_new_tokens: int
    predicted: float | None


@dataclass(frozen=True)
class Running:
    """A request that holds a slot."""

    index: int
    slot: int
    generated: int
    predicted: float | None


@dataclass(frozen=True)
class Plan:
    """Which waiting requests enter which free slots now: pairs (request index, slot), each slot and request once."""

    admit: tuple[tuple[int, int], ...]


@runtime_checkable
class Scheduler(Protocol):
    """Orders the waiting requests. Schedulers change time, never tokens; where not all are waited for (`enough`), they
    decide who ends in time."""

    @property
    def needs_lengths(self) -> bool:
        """Whether it can do nothing sensible without predicted lengths (refused with `predictor=none`)."""

    @property
    def details(self) -> Mapping[str, float]:
        """Figures of the plan that was followed, for the log; empty when there are none."""

    def start(self, waiting: Sequence[Waiting], slots: int) -> None:
        """A new `generate` begins: forget the last one, and make the global plan if there is one."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free_slots: Sequence[int]) -> Plan:
        """Admit at most `len(free_slots)` of the waiting requests; must admit some when nothing is running.

        Who is admitted waits no more, and is not shown again. Where prompts have little room (`sampler.kv_budget`), one
        may begin later than it was admitted, and before all that are admitted after it and need as much.
        """


@runtime_checkable
class Predictor(Protocol):
    """Predicts how long a request goes on after its first `prefix_tokens` tokens, and learns from the finished."""

    @property
    def prefix_tokens(self) -> int:
        """How many tokens each request must have made before it is asked about; 0 asks before any."""

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        """Remaining tokens after the prefix, one per request, or None for 'no idea'.

        `hidden` is the policy's last hidden state after the prefix, None when `prefix_tokens` is 0.
        """

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> Mapping[str, float]:
        """Learn from one `generate`'s rollouts; returns how good the predictions used for it were.

        Held-out rollouts are left out, so that after an evaluation `finished` is empty (and `hidden` None).
        """

    def state(self) -> Mapping[str, Any]:
        """What it has learned, as tensors and plain values, for a checkpoint."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave."""
