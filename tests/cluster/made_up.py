"""A cluster without processes or models: workers that take time by their speeds, die, hang and refuse as they are told
to, on a clock of their own."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from grpo_cli.engine.ray.crew import Crew
from grpo_cli.engine.ray.dealing import Deal, Portion
from grpo_cli.engine.ray.messages import Answer, Done, Failed, Lost, News, Order, Place, Snapshot
from grpo_cli.settings import Sampling
from grpo_cli.types import EngineStats, Finish, Prompt, Request

STARTS_IN = 10.0
WEIGHTS = Snapshot(1, None, None)


def requests_of(*groups: int, tokens: int = 100) -> list[Request]:
    """So many samples of each prompt."""
    prompts = [Prompt(f"p{number}", (1, 2), "") for number in range(len(groups))]
    sampling = Sampling.plain(tokens)
    return [
        Request(prompt, sample, sample, sampling)
        for prompt, group in zip(prompts, groups, strict=True)
        for sample in range(group)
    ]


def length_of(index: int) -> int:
    """Tokens of a reply: any function of the request would do."""
    return 10 + index * 37 % 91


@dataclass
class _Life:
    """A worker from a start to its end."""

    portion: int | None = None
    signs: int = 0
    silent: bool = False  # hangs, or was ended
    answers: list[Answer] = field(default_factory=list)


@dataclass
class MadeUpCluster:
    """`speeds` in tokens per second, one per worker. `dies` and `hangs` say at which answers since the beginning of all
    (counted over all workers) the worker that has it dies or falls silent instead; `refuses` what a worker says to any
    order; `stillborn` are workers that never come up."""

    speeds: Sequence[float]
    dies: frozenset[int] = frozenset()
    hangs: frozenset[int] = frozenset()
    refuses: Mapping[int, Failed] = field(default_factory=dict)
    stillborn: frozenset[int] = frozenset()
    now: float = 0.0
    orders: list[tuple[int, Order]] = field(default_factory=list)
    starts: list[tuple[int, Any]] = field(default_factory=list)
    given: int = 0  # answers that were made, faults included

    def __post_init__(self) -> None:
        self._lives: dict[int, _Life] = {}
        self._events: list[tuple[float, int, int, _Life, Any]] = []
        self._order = count()

    def clock(self) -> float:
        return self.now

    def start(self, worker: int, state: Mapping[str, Any] | None) -> None:
        self.starts.append((worker, state))
        life = self._lives[worker] = _Life()
        if worker in self.stillborn:
            self._later(STARTS_IN, worker, life, Lost("it never came up"))
        else:
            self._later(STARTS_IN, worker, life, place_of(worker))

    def ask(self, worker: int, order: Order) -> None:
        self.orders.append((worker, order))
        life = self._lives[worker]
        life.portion, after = order.portion, 0.0
        if worker in self.refuses:
            self._later(1.0, worker, life, self.refuses[worker])
            return
        for index, _ in order.requests:
            after += length_of(index) / self.speeds[worker]
            answer = Answer(index, (5,) * length_of(index), (-1.0,) * length_of(index), Finish.EOS, 0)
            self._later(after, worker, life, (order.portion, answer))
        stats = EngineStats(decode_steps=1, slots=1)
        self._later(after, worker, life, Done(order.portion, stats, {}, {"worker": worker}, 0.5))

    def cancel(self, worker: int, portion: int) -> None:
        life = self._lives[worker]
        if life.portion == portion and not life.silent:
            self._forget(life)
            self._later(0.1, worker, life, Done(portion, EngineStats(), {}, {}, 0.0))

    def stop(self, worker: int) -> None:
        life = self._lives.pop(worker)
        life.silent = True
        self._forget(life)

    def news(self, seconds: float) -> list[tuple[int, News | Lost]]:
        if not self._events or self._events[0][0] > self.now + seconds:
            self.now += seconds
            return []
        self.now, _, worker, life, what = heapq.heappop(self._events)
        life.signs += 1
        if isinstance(what, tuple):
            portion, answer = what
            self.given += 1
            if self.given in self.dies:
                life.silent = True
                self._forget(life)
                return [(worker, Lost("it was killed"))]
            if self.given in self.hangs:
                life.silent = True
                self._forget(life)
                return []
            return [(worker, News(life.signs, portion=portion, answers=(answer,)))]
        if isinstance(what, Lost):
            return [(worker, what)]
        if isinstance(what, Place):
            return [(worker, News(life.signs, place=what))]
        return [(worker, News(life.signs, portion=what.portion, end=what))]

    def _later(self, seconds: float, worker: int, life: _Life, what: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), worker, life, what))

    def _forget(self, life: _Life) -> None:
        self._events = [event for event in self._events if event[3] is not life]
        heapq.heapify(self._events)


def place_of(worker: int, **changed: Any) -> Place:
    words: dict[str, Any] = dict(node="n", host=f"h{worker}", pid=worker, device="cpu", processor="x", threads=1)
    return Place(**(words | dict(python="3", torch="2", grpo_cli="0", build="b") | changed))


@dataclass
class Served:
    """What came of serving requests by a crew."""

    cluster: MadeUpCluster
    crew: Crew
    deal: Deal
    answers: list[Answer]
    said: list[str]


def served(
    cluster: MadeUpCluster,
    requests: Sequence[Request],
    lengths: Sequence[float] | None = None,
    *,
    timeout: float = 60.0,
    at_once: bool = False,
    crew: Crew | None = None,
) -> Served:
    said: list[str] = []
    crew = crew or Crew(cluster, len(cluster.speeds), timeout, said.append, clock=cluster.clock)
    deal = Deal(requests, lengths, len(cluster.speeds), at_once)
    answers = list(crew.serve(deal, lambda portion: order_of(portion, requests)))
    return Served(cluster, crew, deal, answers, said)


def order_of(portion: Portion, requests: Sequence[Request]) -> Order:
    return Order(portion.number, WEIGHTS, tuple((i, requests[i]) for i in portion.indices), None, None)
