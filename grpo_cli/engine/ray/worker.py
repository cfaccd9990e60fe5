"""A worker: a Ray actor with a copy of the model and an engine of its own, perhaps on another machine.

It generates only with the weights that an order names, and ends itself if its engine hangs.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
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

# The least time limit of a start, in seconds: it imports libraries, copies weights and captures graphs.
START = 300.0


@dataclass(frozen=True)
class Blueprint:
    """What a worker is built from: a hollow model, a reference to its frozen numbers, and `build`, which makes the
    engine from the model, `told`, `meter` and `warn`. `timeout` is in seconds."""

    model: Any
    fixed: Any
    build: Callable[..., Engine]
    device: str
    threads: int
    timeout: float


@dataclass(frozen=True)
class Order:
    """A portion: requests with their indices in the trainer's list. `weights` is a reference to the trained numbers of
    `version`; `lengths` are predictions, if any; `autocast` is the compute dtype, None for the weights' own."""

    version: int
    weights: Any
    requests: tuple[tuple[int, Request], ...]
    lengths: tuple[float, ...] | None
    autocast: torch.dtype | None


@dataclass(frozen=True)
class Done:
    """The account of a finished portion. `seconds` covers all of it, `weights_seconds` the copy of new weights."""

    stats: EngineStats
    warnings: tuple[str, ...]
    facts: Mapping[str, Any]
    seconds: float
    weights_seconds: float


@dataclass(frozen=True)
class Place:
    """Where a process runs, and its software: `processor` decides the kernels, `build` is a hash of grpo-cli's
    source."""

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
    """Serves one portion at a time. `start` is called first, and again after Ray has restarted the process, since a
    restartable actor's constructor cannot take references to Ray's object store."""

    def start(self, blueprint: Blueprint) -> Place:
        """Load everything that a portion needs; may be called twice."""
        import ray

        self._blueprint, self._model = blueprint, blueprint.model
        self._device = torch.device(blueprint.device)
        self._engine: Engine | None = None
        self._version = 0  # no weights yet
        self._warnings: list[str] = []
        self._told: dict[tuple[str, int, int], float] = {}
        self._watchdog = _Watchdog(blueprint.timeout)
        fill(self._model, ray.get(blueprint.fixed), self._device)
        torch.set_num_threads(blueprint.threads)
        return place(ray.get_runtime_context().get_node_id(), self._device)

    def serve(self, order: Order) -> Iterator[tuple[int, Rollout] | Done]:
        """Rollouts with their requests' indices as they finish, then the account."""
        torch.set_num_threads(self._blueprint.threads)  # this and the next line apply per thread
        flush_denormals()
        start = time.perf_counter()
        with self._watchdog.watching(START if self._engine is None else 0.0):
            weights_seconds = self._take_up(order)
            engine = self._ready()
            self._told.clear()
            if order.lengths is not None:
                told = zip(order.requests, order.lengths, strict=True)
                self._told.update({key_of(request): length for (_, request), length in told})
            indices = {id(request): index for index, request in order.requests}  # equal requests are possible
            with torch.autocast(self._device.type, order.autocast) if order.autocast else nullcontext():
                for rollout in engine.generate([request for _, request in order.requests]):
                    yield indices[id(rollout.request)], rollout
        warnings, self._warnings[:] = tuple(self._warnings), []
        seconds = time.perf_counter() - start
        yield Done(engine.stats(), warnings, dict(engine.facts()), seconds, weights_seconds)

    def _take_up(self, order: Order) -> float:
        """Copy the order's weights unless they are here already; returns the seconds taken."""
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
        """The engine, made once there are weights, which it may read."""
        if self._engine is None:
            self._engine = self._blueprint.build(
                self._model, told=self._told, meter=self._watchdog, warn=self._warnings.append
            )
        return self._engine


class _Watchdog:
    """A meter that measures nothing, and ends the process if no span opens for `timeout` seconds. Ray does not check
    whether a live process makes progress; `faulthandler` works even if it is stuck in C code, and leaves a traceback in
    Ray's log."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._again = timeout, 0.0  # when it is armed again

    @contextmanager
    def watching(self, at_first: float) -> Iterator[None]:
        """With at least `at_first` seconds until the first span."""
        self._arm(max(at_first, self._timeout))
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if time.monotonic() > self._again:  # not every time: arming takes as long as a small decode step
            self._arm(self._timeout)
            self._again = time.monotonic() + self._timeout / 8
        yield

    def _arm(self, seconds: float) -> None:
        self._again = 0.0
        faulthandler.dump_traceback_later(seconds, file=2, exit=True)

    def take(self) -> Mapping[str, float]:
        return {}


def place(node: str, device: torch.device) -> Place:
    """The place of this process."""
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
    """A hash of grpo-cli's own source: equal sources compute the same."""
    package = Path(grpo_cli.__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*package.rglob("*.py"), *package.rglob("*.c")]):
        digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]
