"""The workers of a run. Ray starts them, transports orders and rollouts, and restarts those that die.

A rollout is a function of the weights and its request, so whatever a lost worker has not delivered goes to the others.
Ray's own retry would leave it with the same actor, for which the remaining nodes may have no room.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.engine.ray.session import reason_of, session
from grpo_cli.engine.ray.worker import START, Blueprint, Done, Order, Place, RolloutWorker
from grpo_cli.interfaces import Meter
from grpo_cli.support.errors import UserError
from grpo_cli.types import Request, Rollout

# Consecutive failures of a worker, without a rollout in between, after which it is given up.
TRIES = 3
POLL = 1.0  # seconds of waiting after which Ray itself is checked
# The part of an equal share that each worker gets first, and then of an equal share of the rest (Hummel, Schonberg and
# Flynn, 1992, "Factoring"). Each portion ends with idle slots, so few are better; but with one portion each there would
# be nothing left to balance the load.
FIRST, LATER = 0.9, 0.5


def portions(
    requests: Sequence[Request], lengths: Sequence[float] | None, workers: int, at_once: bool
) -> list[tuple[int, ...]]:
    """Indices of requests, in the order in which idle workers get them. A prompt's samples stay together, since they
    share its keys, unless they exceed a worker's share; with predicted lengths the longest go first. `at_once`: a
    worker runs a portion as one batch, so each worker gets just one."""
    weights = lengths or [float(request.sampling.max_new_tokens) for request in requests]

    def weight(indices: Sequence[int]) -> float:
        return sum(weights[index] for index in indices)

    of_prompt: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        of_prompt.setdefault(request.prompt.id, []).append(index)
    share = weight(range(len(requests))) / workers or 1.0
    bundles = [piece for indices in of_prompt.values() for piece in cut(indices, -int(-weight(indices) // share))]
    if lengths:
        bundles.sort(key=lambda bundle: -max(lengths[index] for index in bundle))
    left, dealt = deque((bundle, weight(bundle)) for bundle in bundles), list[tuple[int, ...]]()
    part, later = (1.0, 1.0) if at_once or workers == 1 else (FIRST, LATER)
    while left:
        wanted = sum(load for _, load in left) / workers * part
        for _ in range(min(workers, len(left))):
            if left:
                taken, load = left.popleft()
                while left and load + left[0][1] / 2 <= wanted:
                    bundle, more = left.popleft()
                    taken, load = taken + bundle, load + more
                dealt.append(taken)
        part = later
    return dealt


def cut(indices: Sequence[int], pieces: int) -> list[tuple[int, ...]]:
    """Cut into about equal pieces, in order; no piece is empty."""
    pieces = max(1, min(pieces, len(indices)))
    ends = [len(indices) * piece // pieces for piece in range(pieces + 1)]
    return [tuple(indices[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


@dataclass
class _Worker:
    """`coming` is the reference to its place until it is ready, then to the stream of a portion's answers, or None."""

    actor: Any
    coming: Any = None
    place: Place | None = None
    missing: tuple[int, ...] = ()  # requested and not delivered
    failures: int = 0  # since it last delivered a rollout

    @property
    def busy(self) -> bool:
        return self.place is not None and self.coming is not None


class WorkerPool:
    """`count` actors with these Ray options. `check` gets each one's place, and raises UserError if unusable."""

    def __init__(
        self,
        count: int,
        options: Mapping[str, Any],
        blueprint: Blueprint,
        warn: Callable[[str], None],
        check: Callable[[Place], None],
        meter: Meter,
    ) -> None:
        import ray

        actor: Any = ray.remote(max_restarts=-1, **options)(RolloutWorker)
        self._workers = {number: _Worker(actor.remote()) for number in range(count)}
        self._blueprint, self._patience = ray.put(blueprint), max(START, blueprint.timeout)
        self._warn, self._check, self._span = warn, check, meter.span
        self._warned = set[str]()
        self._given_up: list[str] = []
        self._queue: deque[tuple[int, ...]] = deque()
        self.again = 0  # requests of the last `serve` that were sent a second time
        self.ends: list[tuple[int, Done]] = []  # of its portions, with their workers' numbers
        for number in self._workers:
            self._await(number)

    def serve(
        self, portions: Sequence[tuple[int, ...]], order_of: Callable[[tuple[int, ...]], Order]
    ) -> Iterator[tuple[int, Rollout]]:
        """Every request's rollout once, in order of arrival. A pool whose `serve` is not exhausted must be closed."""
        import ray

        self._queue, self.again, self.ends = deque(portions), 0, []
        last_ready = time.monotonic()
        while self._queue or any(worker.busy for worker in self._workers.values()):
            with session.answering():
                with self._span("dealing"):
                    self._deal(order_of)
                    coming = {w.coming: number for number, w in self._workers.items() if w.coming is not None}
                with self._span("decode"):  # waiting for the workers
                    ready, _ = ray.wait([*coming], timeout=POLL)
                with self._span("dealing"):
                    answers = [answer for reference in ready for answer in self._hear(coming[reference])]
            yield from answers
            now = time.monotonic()
            last_ready = now if self.places else last_ready
            if now - last_ready > self._patience:
                raise _nobody(f"none has started within {self._patience:g} s")

    def _deal(self, order_of: Callable[[tuple[int, ...]], Order]) -> None:
        for worker in self._workers.values():
            if self._queue and worker.place is not None and worker.coming is None:
                worker.missing = self._queue.popleft()
                worker.coming = worker.actor.serve.options(num_returns="streaming").remote(order_of(worker.missing))

    def _hear(self, number: int) -> list[tuple[int, Rollout]]:
        import ray

        worker = self._workers[number]
        try:
            answer = ray.get(next(worker.coming) if worker.busy else worker.coming)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from error
            self._lose(number, reason_of(error.cause))
            return []
        except ray.exceptions.RayError as error:
            self._lose(number, reason_of(error))
            return []
        if isinstance(answer, Place):
            self._check(answer)
            worker.place, worker.coming = answer, None
        elif isinstance(answer, Done):
            worker.coming = None
            self.ends.append((number, answer))
            for text in set(answer.warnings) - self._warned:  # each worker gives the same ones
                self._warned.add(text)
                self._warn(text)
        else:
            worker.failures = 0
            worker.missing = tuple(index for index in worker.missing if index != answer[0])
            return [answer]
        return []

    def _await(self, number: int) -> None:
        """Ask for its place, which arrives once Ray has found room on a node and started it."""
        worker = self._workers[number]
        worker.place, worker.missing = None, ()
        worker.coming = worker.actor.start.options(max_task_retries=-1).remote(self._blueprint)

    def _lose(self, number: int, reason: str) -> None:
        import ray

        worker = self._workers[number]
        if worker.missing:
            self.again += len(worker.missing)
            self._queue.extendleft(cut(worker.missing, len(self._workers)))
        worker.failures += 1
        if worker.failures < TRIES:
            self._warn(f"worker {number} is lost ({reason}); its requests go to others, and Ray restarts it")
            self._await(number)
            return
        del self._workers[number]
        ray.kill(worker.actor)
        self._given_up.append(f"worker {number}: {reason}")
        self._warn(f"worker {number} is given up after {TRIES} failures without a rollout: {reason}")
        if not self._workers:
            raise _nobody("; ".join(self._given_up))

    @property
    def places(self) -> Mapping[int, Place]:
        """The places of the ready workers."""
        return {number: worker.place for number, worker in self._workers.items() if worker.place is not None}

    def close(self) -> None:
        import ray

        for worker in self._workers.values():
            if ray.is_initialized():
                ray.kill(worker.actor)
        self._workers.clear()


def _nobody(reason: str) -> UserError:
    return UserError(
        f"no worker is left to make rollouts: {reason}. The last checkpoint is kept: once the cause is mended, "
        "continue from it with grpo train resume=auto"
    )
