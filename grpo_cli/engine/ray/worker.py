"""A worker: a copy of the model and an engine of its own, in a process of its own, perhaps on another machine.

It serves one portion at a time, in a thread; the thread that the trainer talks to stays free for it. It never serves
with other weights than it was asked to.
"""

from __future__ import annotations

import hashlib
import os
import platform
import queue
import socket
import sys
import threading
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
from grpo_cli.engine.ray.messages import Answer, Done, Failed, News, Order, Place, Snapshot
from grpo_cli.engine.ray.parcel import TensorBytes, fill, from_skeleton
from grpo_cli.interfaces import Engine
from grpo_cli.support.errors import UserError
from grpo_cli.support.processor import flush_denormals
from grpo_cli.types import Request, Rollout


@dataclass(frozen=True)
class Blueprint:
    """What a worker is built from. `build` makes an engine of a model; it is given `told`, `meter` and `warn` too.
    `fetch` takes handles out of the cluster's store."""

    skeleton: bytes
    build: Callable[..., Engine]
    device: str
    threads: int
    fetch: Callable[[Any], Mapping[str, TensorBytes]]


class Cancelled(Exception):
    """The portion is not wanted any more."""


class RolloutWorker:
    """Orders in, news out. `state` is what the worker before it had learnt."""

    def __init__(self, blueprint: Blueprint, node: str, state: Mapping[str, Any] | None) -> None:
        self._blueprint, self._node, self._state = blueprint, node, state
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._place: Place | None = None
        self._portion: int | None = None
        self._answers: list[Answer] = []
        self._end: Done | Failed | None = None
        self._said: list[str] = []
        self._signs = 0
        self._unwanted = -1  # the number of a portion
        self._told: dict[tuple[str, int, int], float] = {}
        self._weights: Snapshot | None = None
        threading.Thread(target=self._work, name="rollouts", daemon=True).start()

    def ask(self, order: Order) -> None:
        """To be served when what was asked before has ended."""
        self._orders.put(order)

    def cancel(self, portion: int) -> None:
        """A portion is not wanted any more; its end comes all the same."""
        self._unwanted = portion

    def take(self, seconds: float) -> News:
        """What there is to tell; waits so long for something besides signs of life."""
        until = time.monotonic() + seconds
        with self._changed:
            while not (self._answers or self._end or self._said or self._place):
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            news = News(self._signs, self._place, self._portion, tuple(self._answers), self._end, tuple(self._said))
            self._place, self._answers, self._end, self._said = None, [], None, []
        return news

    def _work(self) -> None:
        with self._failing(None):
            self._build()
            while True:
                self._serve(self._orders.get())

    @contextmanager
    def _failing(self, portion: int | None) -> Iterator[None]:
        """Whatever an engine raises, of any kind, is the trainer's to know; this process stays to tell it."""
        try:
            yield
        except UserError as error:
            self._tell(end=Failed(portion, str(error), refused=True))
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "") or "no reason given"
            self._tell(end=Failed(portion, f"{type(error).__name__}: {reason}", refused=False))

    def _build(self) -> None:
        torch.set_num_threads(self._blueprint.threads)
        flush_denormals()
        device = torch.device(self._blueprint.device)
        self._model = from_skeleton(self._blueprint.skeleton, device)
        self._engine: Engine | None = None
        self._tell(place=place(self._node, device))

    def _serve(self, order: Order) -> None:
        self._portion = order.portion
        with self._failing(order.portion):
            seconds = self._take_up(order.weights)
            engine = self._ready()
            self._told.clear()
            if order.lengths is not None:
                told = zip(order.requests, order.lengths, strict=True)
                self._told.update({key_of(request): length for (_, request), length in told})
            kind = torch.device(self._blueprint.device).type
            precision = torch.autocast(kind, order.autocast) if order.autocast else nullcontext()
            places = {id(request): index for index, request in order.requests}  # two may be equal
            try:
                with precision:
                    for rollout in engine.generate([request for _, request in order.requests]):
                        self._tell(answer=_answer(places[id(rollout.request)], rollout))
            except Cancelled:
                pass
            stats, facts, state = engine.stats(), engine.facts(), engine.state_dict()
            self._tell(end=Done(order.portion, stats, dict(facts), dict(state), seconds))

    def _take_up(self, weights: Snapshot) -> float:
        """Have these weights, and no others; returns the seconds that it took."""
        had = self._weights
        if had is not None and had.version == weights.version:
            return 0.0
        start = time.perf_counter()
        if had is None:
            fill(self._model, self._blueprint.fetch(weights.fixed))
        fill(self._model, self._blueprint.fetch(weights.moving))
        self._weights = weights
        if self._engine is not None:
            self._engine.update_weights()
        return time.perf_counter() - start

    def _ready(self) -> Engine:
        """The engine, which may look at the weights when it is made."""
        if self._engine is None:
            self._engine = self._blueprint.build(
                self._model, told=self._told, meter=_SignsOfLife(self._sign), warn=self._say
            )
            if self._state is not None:
                self._engine.load_state_dict(self._state)
        return self._engine

    def _say(self, text: str) -> None:
        self._tell(said=text)

    def _sign(self) -> None:
        self._signs += 1
        if self._portion is not None and self._unwanted == self._portion:
            raise Cancelled

    def _tell(
        self,
        answer: Answer | None = None,
        end: Done | Failed | None = None,
        place: Place | None = None,
        said: str | None = None,
    ) -> None:
        with self._changed:
            self._signs += 1
            self._answers += [] if answer is None else [answer]
            self._said += [] if said is None else [said]
            self._end, self._place = end or self._end, place or self._place
            self._changed.notify()


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
    """Where this process is, and what it would compute with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Place(
        node=node,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=name,
        processor=_processor(),
        threads=torch.get_num_threads(),
        python=".".join(map(str, sys.version_info[:3])),
        torch=torch.__version__,
        grpo_cli=grpo_cli.__version__,
        build=fingerprint(),
    )


def _processor() -> str:
    """As far as it decides which kernels compute."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


@cache
def fingerprint() -> str:
    """Of grpo-cli's own source: two that are equal compute the same."""
    package = Path(grpo_cli.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _answer(index: int, rollout: Rollout) -> Answer:
    return Answer(index, rollout.token_ids, rollout.sampler_logprobs, rollout.finish, rollout.kept_kv)


def rollout_of(answer: Answer, request: Request) -> Rollout:
    """The rollout that an answer tells of."""
    return Rollout(request, answer.token_ids, answer.sampler_logprobs, answer.finish, answer.kept_kv)
