"""A worker: an actor of Ray with a copy of the model and an engine of its own, perhaps on another machine.

It never serves with other weights than it was asked to.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import grpo_cli
from grpo_cli.engine.order.predict import key_of
from grpo_cli.engine.ray.weights import fill
from grpo_cli.interfaces import Engine
from grpo_cli.support.processor import flush_denormals
from grpo_cli.types import EngineStats, Request, Rollout


@dataclass(frozen=True)
class Blueprint:
    """What workers are built from: a hollow model, a reference to what of its numbers is not trained, and `build`, that
    makes an engine of it and is given `told`, `meter` and `warn` too. `learnt`: what a checkpoint has of the engine of
    each worker."""

    model: Any
    fixed: Any
    build: Callable[..., Engine]
    device: str
    threads: int
    learnt: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Order:
    """A portion: requests by their places in the trainer's list, in the order in which a worker is to take them.
    `weights`: a reference to what is trained, of one `version`. `lengths`: what is expected of each request, None where
    nobody knows. `autocast`: the computation's precision, None for that of the weights."""

    version: int
    weights: Any
    requests: tuple[tuple[int, Request], ...]
    lengths: tuple[float, ...] | None
    autocast: torch.dtype | None


@dataclass(frozen=True)
class Done:
    """What a portion cost, what the engine has warned of, says of itself and has learnt of lengths. `seconds` are those
    of the whole portion, `weights_seconds` those until the weights were there (0 where they had been)."""

    stats: EngineStats
    said: tuple[str, ...]
    facts: Mapping[str, Any]
    learnt: Mapping[str, Any]
    seconds: float
    weights_seconds: float


@dataclass(frozen=True)
class Place:
    """Where a process runs and what: `processor` as far as it decides which kernels compute, `build` a fingerprint of
    grpo-cli's own source."""

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


class RolloutWorker:
    """Serves one portion at a time; `signs` answers meanwhile. `start` comes first, again whenever Ray has restarted
    it: what lies in Ray's store cannot be an argument of an actor that may be restarted."""

    def __init__(self) -> None:
        self._signs = 0

    def start(self, blueprint: Blueprint, number: int) -> Place:
        """All that it has to know; Ray may ask twice."""
        import ray

        self._model, self._build, self._learnt = blueprint.model, blueprint.build, blueprint.learnt.get(number)
        self._device, self._threads = torch.device(blueprint.device), blueprint.threads
        self._engine: Engine | None = None
        self._version = 0  # of no weights yet
        self._rollouts: Any = ExitStack()  # of the last portion
        self._said: list[str] = []
        self._told: dict[tuple[str, int, int], float] = {}
        fill(self._model, ray.get(blueprint.fixed), self._device)
        torch.set_num_threads(self._threads)
        return place(ray.get_runtime_context().get_node_id(), self._device)

    def signs(self) -> int:
        """Grows as long as it is at work."""
        return self._signs

    def serve(self, order: Order) -> Iterator[tuple[int, Rollout] | Done]:
        """Rollouts with the places of their requests, as they end."""
        self._rollouts.close()  # Ray leaves a stream that was cancelled as it stands
        torch.set_num_threads(self._threads)  # this and the next hold for the thread that computes
        flush_denormals()
        start = time.perf_counter()
        weights_seconds = self._take_up(order)
        engine = self._ready()
        self._told.clear()
        if order.lengths is not None:
            told = zip(order.requests, order.lengths, strict=True)
            self._told.update({key_of(request): length for (_, request), length in told})
        places = {id(request): index for index, request in order.requests}  # two may be equal
        with torch.autocast(self._device.type, order.autocast) if order.autocast else nullcontext():
            self._rollouts = engine.generate([request for _, request in order.requests])
            for rollout in self._rollouts:
                yield places[id(rollout.request)], rollout
        said, self._said[:] = tuple(self._said), []
        seconds = time.perf_counter() - start
        yield Done(engine.stats(), said, dict(engine.facts()), dict(engine.state_dict()), seconds, weights_seconds)

    def _take_up(self, order: Order) -> float:
        """Have these weights, and no others; returns the seconds that it took."""
        if self._version == order.version:
            return 0.0
        import ray

        start = time.perf_counter()
        fill(self._model, ray.get(order.weights), self._device)
        if self._engine is not None:
            self._engine.update_weights()
        self._version = order.version
        return time.perf_counter() - start

    def _ready(self) -> Engine:
        """The engine, which may look at the weights when it is made."""
        if self._engine is None:
            meter = _SignsOfLife(self._sign)
            self._engine = self._build(self._model, told=self._told, meter=meter, warn=self._said.append)
            if self._learnt is not None:
                self._engine.load_state_dict(self._learnt)
        return self._engine

    def _sign(self) -> None:
        import ray

        self._signs += 1
        if ray.get_runtime_context().is_canceled():
            raise RuntimeError("the portion is not wanted any more")


class _SignsOfLife:
    """A meter that measures nothing: whoever opens a span is at work."""

    def __init__(self, sign: Callable[[], None]) -> None:
        self._sign = sign

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self._sign()
        yield

    def take(self) -> Mapping[str, float]:
        return {}


def place(node: str, device: torch.device) -> Place:
    """Of this process, and what it would compute with."""
    return Place(
        node=node,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        processor=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        grpo_cli=grpo_cli.__version__,
        build=_fingerprint(),
    )


@cache
def _fingerprint() -> str:
    """Of grpo-cli's own source: two that are equal compute the same."""
    package = Path(grpo_cli.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]
