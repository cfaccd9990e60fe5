"""The workers of a run and what becomes of them: who is ready, who is at work, who has been silent too long, who starts
anew. It knows nothing of Ray; a `Cluster` starts and ends workers and carries messages.

A worker that is lost is started anew at once, and what it had not delivered goes to others. One that fails again and
again without having delivered anything in between is given up; when all are, that is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from grpo_cli.engine.ray.dealing import Deal, Portion
from grpo_cli.engine.ray.messages import Answer, Done, Failed, Lost, News, Order, Place
from grpo_cli.interfaces import Meter
from grpo_cli.support.errors import UserError
from grpo_cli.support.meter import NullMeter

# Starts of a worker that may fail one after the other.
TRIES = 3
# Seconds that a start may take whatever `timeout` says: libraries are imported, and perhaps room is waited for.
START = 300.0
POLL = 0.2  # seconds without news until clocks are looked at again


@runtime_checkable
class Cluster(Protocol):
    """What carries messages between the trainer and its workers, which have numbers."""

    def start(self, worker: int, state: Mapping[str, Any] | None) -> None:
        """Begin to start a worker, the one of that number before it ended; its first news is its `place`. `state` is
        what the last one of this number had learnt."""

    def ask(self, worker: int, order: Order) -> None: ...

    def cancel(self, worker: int, portion: int) -> None:
        """Have it give up a portion, of which it then tells the end."""

    def news(self, seconds: float) -> Sequence[tuple[int, News | Lost]]:
        """Of any worker; waits at most so long for the first."""

    def stop(self, worker: int) -> None:
        """End it, whatever it does."""


@dataclass
class _Worker:
    since: float  # when it last gave a sign of life
    place: Place | None = None  # None: not ready yet
    portion: Portion | None = None
    owed: int = 0  # answers of this portion that it has not given, of the `generate` that goes on
    signs: int = -1
    tries: int = 1  # starts since it last delivered something
    given_up: str = ""  # why
    tokens: int = 0  # delivered, in `busy` seconds, of this `generate`
    busy: float = 0.0
    asked: float = 0.0  # when it was given its portion
    speed: float | None = None  # tokens per second, of the last `generate` in which it delivered any
    weights_seconds: float = 0.0
    ends: list[Done] = field(default_factory=list)
    state: Mapping[str, Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        return self.place is not None and self.portion is None and not self.given_up


class Crew:
    """`workers` workers of a cluster. `check` looks at the place of each new one, and raises what cannot be borne."""

    def __init__(
        self,
        cluster: Cluster,
        workers: int,
        timeout: float,
        warn: Callable[[str], None],
        check: Callable[[Place], None] = lambda place: None,
        states: Mapping[int, Mapping[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        meter: Meter | None = None,
    ) -> None:
        self._span = (meter or NullMeter()).span
        self._cluster, self._timeout, self._warn, self._check, self._clock = cluster, timeout, warn, check, clock
        self._said = set[str]()
        self._heard = clock()  # when somebody listened last
        self._workers = {number: _Worker(clock(), state=(states or {}).get(number)) for number in range(workers)}
        for number, worker in self._workers.items():
            cluster.start(number, worker.state)

    def serve(self, deal: Deal, order_of: Callable[[Portion], Order]) -> Iterator[Answer]:
        """Everything that `deal` has, each answer once, as they come in."""
        for worker in self._workers.values():
            worker.tokens, worker.busy, worker.weights_seconds, worker.ends = 0, 0.0, 0.0, []
            worker.owed = -1  # of a portion that was called off
            worker.since += self._clock() - self._heard  # nobody has listened since the last `generate`
        try:
            while deal.open or any(worker.portion and not worker.owed for worker in self._workers.values()):
                with self._span("dealing"):
                    self._deal_out(deal, order_of)
                with self._span("decode"):  # here the workers are waited for
                    news = self._cluster.news(POLL)
                with self._span("dealing"):
                    answers = [answer for number, told in news for answer in self._hear(number, told, deal)]
                    self._look_at_clocks(deal)
                    self._check_hands()
                yield from answers
        finally:
            self._heard = self._clock()
            self._call_off()
            for worker in self._workers.values():
                if worker.tokens and worker.busy:
                    worker.speed = worker.tokens / worker.busy

    @property
    def knows_speeds(self) -> bool:
        """Whether every worker has delivered something before."""
        return all(worker.speed for worker in self._workers.values() if not worker.given_up)

    def _deal_out(self, deal: Deal, order_of: Callable[[Portion], Order]) -> None:
        speeds = self._speeds()
        for number, worker in self._workers.items():
            if worker.idle and (portion := deal.next(number, speeds, self._clock())):
                worker.portion, worker.owed = portion, len(portion.indices)
                worker.asked = worker.since = self._clock()
                self._cluster.ask(number, order_of(portion))

    def _speeds(self) -> dict[int, float]:
        """Of all that may come to work. One that has not delivered anything yet is taken for an average one."""
        there = {number: worker for number, worker in self._workers.items() if not worker.given_up}
        known = [worker.speed for worker in there.values() if worker.speed]
        mean = sum(known) / len(known) if known else 1.0
        return {number: worker.speed or mean for number, worker in there.items()}

    def _hear(self, number: int, told: News | Lost, deal: Deal) -> Iterator[Answer]:
        worker = self._workers[number]
        if isinstance(told, Lost):
            self._lose(number, told.reason, deal)
            return
        if told.signs != worker.signs:
            worker.signs, worker.since = told.signs, self._clock()
        for text in told.said:
            if text not in self._said:  # each worker says the same
                self._said.add(text)
                self._warn(text)
        if told.place is not None:
            self._check(told.place)
            worker.place = told.place
        if told.portion is not None and told.portion == deal.holder(number):  # not one of a `generate` before
            for answer in told.answers:
                worker.tries = 1
                worker.owed -= 1
                worker.tokens += len(answer.token_ids)
                if deal.deliver(answer.index):
                    yield answer
        if told.end is not None:
            self._end(number, told.end, deal)

    def _end(self, number: int, end: Done | Failed, deal: Deal) -> None:
        worker = self._workers[number]
        if isinstance(end, Failed):
            if end.refused:
                raise UserError(end.reason)
            self._lose(number, end.reason, deal)
        elif worker.portion is not None and end.portion == worker.portion.number:
            now = self._clock()
            worker.busy += now - worker.asked
            worker.portion = None
            if deal.holder(number) == end.portion:
                worker.ends.append(end)
                worker.weights_seconds += end.weights_seconds
                worker.state, worker.facts = end.state, end.facts
                deal.end(number, now)

    def _lose(self, number: int, reason: str, deal: Deal) -> None:
        """Start it anew, or give it up."""
        worker = self._workers[number]
        deal.lose(number)
        self._cluster.stop(number)
        worker.place, worker.portion, worker.signs = None, None, -1
        worker.since = self._clock()
        if worker.tries >= TRIES:
            worker.given_up = reason
            self._warn(f"worker {number} is given up after {TRIES} starts in which it delivered nothing: {reason}")
            return
        worker.tries += 1
        self._warn(f"worker {number} is lost ({reason}); what it has not delivered goes to others, and it starts anew")
        self._cluster.start(number, worker.state)

    def _look_at_clocks(self, deal: Deal) -> None:
        now = self._clock()
        for number, worker in self._workers.items():
            silent, patience = now - worker.since, max(START, self._timeout)
            if worker.given_up or worker.idle:
                continue
            if worker.place is None and silent > patience:
                self._lose(number, f"it did not start within {patience:g} s", deal)
            elif worker.place is not None and silent > self._timeout:
                self._lose(number, f"it gave no sign of life for {self._timeout:g} s (engine.timeout)", deal)

    def _check_hands(self) -> None:
        if all(worker.given_up for worker in self._workers.values()):
            last = "; ".join(f"worker {number}: {worker.given_up}" for number, worker in self._workers.items())
            raise UserError(
                f"no worker is left to make rollouts: {last}. The last checkpoint is kept: go on from it with "
                "grpo train resume=auto when what they ran into is mended"
            )

    def _call_off(self) -> None:
        """What nobody waits for any more: portions that were asked of two, or of which no more is wanted."""
        for number, worker in self._workers.items():
            if worker.portion is not None:
                worker.busy += self._clock() - worker.asked
                self._cluster.cancel(number, worker.portion.number)

    @property
    def places(self) -> dict[int, Place]:
        """Of the workers that are ready."""
        return {number: worker.place for number, worker in self._workers.items() if worker.place is not None}

    @property
    def states(self) -> dict[int, Mapping[str, Any]]:
        """What each worker's engine had learnt at the end of its last portion."""
        return {number: worker.state for number, worker in self._workers.items() if worker.state is not None}

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the engines say of themselves; where they differ, one of them."""
        return next((worker.facts for worker in self._workers.values() if worker.facts), {})

    @property
    def ends(self) -> list[Done]:
        """Of the portions of the last `serve`."""
        return [end for worker in self._workers.values() for end in worker.ends]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each worker that made some in the last `serve`, while it was at it."""
        return [worker.tokens / worker.busy for worker in self._workers.values() if worker.tokens and worker.busy]

    @property
    def weights_seconds(self) -> float:
        """The longest that a worker took to have the weights in the last `serve`."""
        return max((worker.weights_seconds for worker in self._workers.values()), default=0.0)
