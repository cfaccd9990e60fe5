"""What a trainer and its workers tell each other. Everything here is frozen, and goes over the wire as it is.

trainer -> worker   `Order`: a portion of requests, and the weights to serve them with
worker -> trainer   `News`: what has ended since it was last asked, and whether it is still at work
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from grpo_cli.types import EngineStats, Finish, Request


@dataclass(frozen=True)
class Snapshot:
    """Weights of one `version`, as handles of what lies in the cluster's store: `fixed` for the whole run, `moving` put
    there anew after each update."""

    version: int
    fixed: Any
    moving: Any


@dataclass(frozen=True)
class Order:
    """`requests` by their places in the trainer's list, in the order in which a worker is to take them. `lengths`:
    what is expected of each, None where nobody knows. `autocast`: the computation's precision, None for that of the
    weights."""

    portion: int
    weights: Snapshot
    requests: tuple[tuple[int, Request], ...]
    lengths: tuple[float, ...] | None
    autocast: torch.dtype | None


@dataclass(frozen=True)
class Answer:
    """A rollout without its request, which is known by its place where it goes to."""

    index: int
    token_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    finish: Finish
    kept_kv: int


@dataclass(frozen=True)
class Place:
    """Where a worker runs and what it runs: `build` is a fingerprint of grpo-cli's own source."""

    node: str
    host: str
    pid: int
    device: str
    processor: str
    threads: int
    python: str
    torch: str
    grpo_cli: str
    build: str


@dataclass(frozen=True)
class Done:
    """The end of a portion: what it cost, what the engine says of itself and has learnt, and the seconds that it took
    to have the weights (0 where it had them)."""

    portion: int
    stats: EngineStats
    facts: Mapping[str, Any]
    state: Mapping[str, Any]
    weights_seconds: float


@dataclass(frozen=True)
class Failed:
    """The end of a portion, or of the start (`portion` None), by an error. `refused`: it says what a person can do."""

    portion: int | None
    reason: str
    refused: bool


@dataclass(frozen=True)
class News:
    """What a worker has to tell. `signs` counts what it did; as long as it grows the worker is at work. `place` comes
    once, when it is ready for orders."""

    signs: int
    place: Place | None = None
    portion: int | None = None  # that the answers belong to
    answers: tuple[Answer, ...] = ()
    end: Done | Failed | None = None
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lost:
    """Instead of news: the worker is gone."""

    reason: str
