"""The workers of a run: Ray starts them, brings them their orders, and starts anew those that die.

A rollout is a function of the weights and its request, so what a lost worker has not delivered goes to others. Ray's
own retry would leave it to the same worker, which may find no room on the nodes that are left. Nor does Ray ask whether
a process that lives is at work: one that shows no sign of life is ended here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from grpo_cli.engine.ray.session import reason_of, session
from grpo_cli.engine.ray.worker import Done, Order, Place
from grpo_cli.interfaces import Meter
from grpo_cli.support.errors import UserError
from grpo_cli.types import Request, Rollout

# Starts of a worker that may fail one after the other.
TRIES = 3
# Seconds that a start may take whatever `engine.timeout` says: libraries are imported, and perhaps room is waited for.
START = 300.0
POLL = 0.2  # seconds between two looks at signs of life
# The part of its fair share that each worker is dealt at first, and then of its share of what is left (Hummel,
# Schonberg and Flynn, 1992, "Factoring"). Each portion ends with slots that fall empty, so few are better; with one
# portion each there would be nothing to even out by.
FIRST, LATER = 0.9, 0.5


def portions(
    requests: Sequence[Request], lengths: Sequence[float] | None, workers: int, at_once: bool
) -> list[tuple[int, ...]]:
    """Places of requests, in the order in which workers that have nothing to do get them. A prompt's samples stay
    together, since they share its keys, unless they are more than a worker's share; the longest go first where lengths
    are known. `at_once`: a worker runs a portion as one batch, so a second one would cost as long as the first."""
    weights = lengths or [float(request.sampling.max_new_tokens) for request in requests]
    of: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        of.setdefault(request.prompt.id, []).append(index)
    most = sum(weights) / workers or 1.0
    bundles = [
        piece for bundle in of.values() for piece in _cut(bundle, -int(-sum(weights[i] for i in bundle) // most))
    ]
    if lengths:
        bundles.sort(key=lambda bundle: -max(lengths[index] for index in bundle))
    left, dealt = deque(bundles), list[tuple[int, ...]]()
    part, later = (1.0, 1.0) if at_once or workers == 1 else (FIRST, LATER)
    while left:
        wanted = sum(weights[index] for bundle in left for index in bundle) / workers * part
        dealt += [_taken(left, weights, wanted) for _ in range(workers) if left]
        part = later
    return dealt


def _cut(indices: Sequence[int], pieces: int) -> Iterator[tuple[int, ...]]:
    """About equal ones, in order; fewer where there are not as many indices."""
    pieces = max(1, min(pieces, len(indices)))
    for piece in range(pieces):
        yield tuple(indices[len(indices) * piece // pieces : len(indices) * (piece + 1) // pieces])


def _taken(left: deque[tuple[int, ...]], weights: Sequence[float], wanted: float) -> tuple[int, ...]:
    """What comes nearest to `wanted`, and at least one bundle."""
    taken = left.popleft()
    weight = sum(weights[index] for index in taken)
    while left and weight + (more := sum(weights[index] for index in left[0])) / 2 <= wanted:
        taken, weight = taken + left.popleft(), weight + more
    return taken


@dataclass
class _Worker:
    """`coming`: the reference to its place until it is ready, then the stream of a portion's answers, or nothing."""

    actor: Any
    coming: Any = None
    place: Place | None = None
    place_before: Place | None = None  # of the process that was lost
    missing: tuple[int, ...] = ()  # what it was asked for and has not delivered
    tries: int = 1  # starts since it last delivered something
    since: float = 0.0  # when it last showed a sign of life
    signs: int = 0
    asked_signs: Any = None

    @property
    def busy(self) -> bool:
        return self.place is not None and self.coming is not None


class WorkerPool:
    """`actors` are `RolloutWorker`s, `blueprint` a reference to theirs. `check` looks at each one's place, and raises
    what cannot be borne."""

    def __init__(
        self,
        actors: Sequence[Any],
        blueprint: Any,
        timeout: float,
        warn: Callable[[str], None],
        check: Callable[[Place], None],
        meter: Meter,
    ) -> None:
        self._blueprint, self._timeout, self._warn, self._check, self._span = (
            blueprint,
            timeout,
            warn,
            check,
            meter.span,
        )
        self._workers = {number: _Worker(actor) for number, actor in enumerate(actors)}
        self._given_up: list[str] = []
        self._said = set[str]()
        self._queue: deque[tuple[int, ...]] = deque()
        self._looked = 0.0  # when signs of life were last looked at
        self.again = 0  # requests of the last `serve` that were dealt a second time
        self.ends: list[tuple[int, Done]] = []  # of its portions, with the numbers of the workers
        for number in self._workers:
            self._await(number)

    def serve(
        self, portions: Sequence[tuple[int, ...]], order_of: Callable[[tuple[int, ...]], Order]
    ) -> Iterator[tuple[int, Rollout]]:
        """Every request's rollout once, as they come in."""
        import ray

        self._queue, self.again, self.ends = deque(portions), 0, []
        for worker in self._workers.values():
            worker.since = time.monotonic()  # nobody has listened since the last one
        try:
            while self._queue or any(worker.busy for worker in self._workers.values()):
                with session.answering():
                    with self._span("dealing"):
                        self._deal(order_of)
                        coming = {w.coming: number for number, w in self._workers.items() if w.coming is not None}
                    with self._span("decode"):  # here the workers are waited for
                        ready, _ = ray.wait([*coming], timeout=POLL)
                    with self._span("dealing"):
                        answers = [answer for reference in ready for answer in self._hear(coming[reference])]
                        self._look_for_signs()
                yield from answers
        finally:
            self._call_off()

    def _deal(self, order_of: Callable[[tuple[int, ...]], Order]) -> None:
        for worker in self._workers.values():
            if self._queue and worker.place is not None and worker.coming is None:
                worker.missing, worker.since = self._queue.popleft(), time.monotonic()
                serve = worker.actor.serve.options(num_returns="streaming")
                worker.coming = serve.remote(order_of(worker.missing))

    def _hear(self, number: int) -> list[tuple[int, Rollout]]:
        import ray

        worker = self._workers[number]
        try:
            told = ray.get(next(worker.coming) if worker.busy else worker.coming)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from error
            ray.kill(worker.actor, no_restart=False)  # what an error has left of its engine is not to be relied on
            self._lose(number, reason_of(error.cause))
            return []
        except ray.exceptions.RayError as error:
            self._lose(number, reason_of(error))
            return []
        worker.since = time.monotonic()
        if isinstance(told, Place):
            self._greet(number, told)
        elif isinstance(told, Done):
            worker.coming = None
            self.ends.append((number, told))
            for text in set(told.said) - self._said:  # each worker says the same
                self._said.add(text)
                self._warn(text)
        else:
            worker.tries = 0
            worker.missing = tuple(index for index in worker.missing if index != told[0])
            return [told]
        return []

    def _greet(self, number: int, place: Place) -> None:
        worker = self._workers[number]
        if place == worker.place_before:  # the answer of a process that is about to be ended
            self._await(number)
        else:
            self._check(place)
            worker.place, worker.coming = place, None

    def _await(self, number: int) -> None:
        """Its place, which it tells as soon as Ray has started it: perhaps once there is room on some node."""
        worker = self._workers[number]
        worker.place, worker.missing, worker.since = None, (), time.monotonic()
        worker.coming = worker.actor.start.options(max_task_retries=-1).remote(self._blueprint, number)

    def _lose(self, number: int, reason: str) -> None:
        import ray

        worker = self._workers[number]
        if worker.missing:
            self.again += len(worker.missing)
            self._queue.extendleft(_cut(worker.missing, len(self._workers)))
        if worker.tries < TRIES:
            worker.tries += 1
            worker.place_before = worker.place or worker.place_before
            self._await(number)
            self._warn(
                f"worker {number} is lost ({reason}); what it has not delivered goes to others, and Ray starts it anew"
            )
            return
        del self._workers[number]
        ray.kill(worker.actor)
        self._given_up.append(f"worker {number}: {reason}")
        self._warn(f"worker {number} is given up after {TRIES} starts in which it delivered nothing: {reason}")
        if not self._workers:
            raise self._nobody("; ".join(self._given_up))

    def _look_for_signs(self) -> None:
        """End workers that stand still. Ray restarts them."""
        import ray

        now = time.monotonic()
        if now - self._looked < POLL:
            return
        self._looked, patience = now, max(START, self._timeout)
        for number, worker in [*self._workers.items()]:
            if worker.busy and self._is_still(worker, now, patience if worker.tries else self._timeout):
                ray.kill(worker.actor, no_restart=False)
                self._lose(number, f"it gave no sign of life for {self._timeout:g} s (engine.timeout)")
        if not any(worker.place or now - worker.since < patience for worker in self._workers.values()):
            raise self._nobody(f"none has started within {patience:g} s")

    def _is_still(self, worker: _Worker, now: float, patience: float) -> bool:
        import ray

        if worker.asked_signs is None:
            worker.asked_signs = worker.actor.signs.options(concurrency_group="signs").remote()
        elif ray.wait([worker.asked_signs], timeout=0)[0]:
            with suppress(ray.exceptions.RayError):  # it is lost, which its stream will say
                signs = ray.get(worker.asked_signs)
                worker.since = now if signs != worker.signs else worker.since
                worker.signs = signs
            worker.asked_signs = None
        return now - worker.since > patience

    @staticmethod
    def _nobody(reason: str) -> UserError:
        return UserError(
            f"no worker is left to make rollouts: {reason}. The last checkpoint is kept: go on from it with "
            "grpo train resume=auto when what they ran into is mended"
        )

    def _call_off(self) -> None:
        """What nobody waits for any more."""
        import ray

        for worker in self._workers.values():
            if worker.busy:
                if ray.is_initialized():
                    ray.cancel(worker.coming)
                worker.coming, worker.missing = None, ()

    @property
    def places(self) -> Mapping[int, Place]:
        """Of the workers that are ready."""
        return {number: worker.place for number, worker in self._workers.items() if worker.place is not None}

    def close(self) -> None:
        import ray

        for worker in self._workers.values():
            if ray.is_initialized():
                ray.kill(worker.actor)
        self._workers.clear()
