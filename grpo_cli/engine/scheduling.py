"""The order in which waiting sequences get slots. A scheduler changes time, never tokens; only the engine acts.

All of them read the predicted lengths once, when a `generate` starts. None leaves a slot empty while a sequence waits,
so any of them is within 2 - 1/slots of the shortest possible makespan, whatever was predicted (Graham).

With `sampler=infinite` the number of decode steps is the makespan of the lengths on the slots. There `lpt` is good.
`fptas` is close to the optimum if the predictions are true; `lpt` suffers less from wrong ones. `sjf`, the published
refill rule, is the worst, because its longest sequences start last. With `sampler=micro` the number is the sum of the
longest length of each round, and `lpt` makes it smallest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from itertools import chain
from typing import Annotated, Protocol, runtime_checkable

from pydantic import Field

from grpo_cli.engine.assignment import assign
from grpo_cli.engine.sequence import Sequence


@runtime_checkable
class Scheduler(Protocol):
    """An order of the waiting sequences. It changes time, never tokens; where generation stops early (`enough`), it
    decides which rollouts finish in time."""

    @property
    def needs_lengths(self) -> bool:
        """True if it is useless without predicted lengths, and so refused with `predictor=none`."""

    def start(self, waiting: Seq[Sequence], slots: int, refills: bool) -> None:
        """Plan a new `generate`. With `refills` a free slot is taken at once, else all are, in rounds."""

    def next(self, running: Seq[Sequence]) -> Sequence:
        """Return the waiting sequence that begins next, beside those that run. It is called for a free slot, at most
        once for each sequence. Under a tight `sampler.kv_budget` the sequence may start later."""


def planned_steps(waiting: Seq[Sequence]) -> dict[Sequence, int]:
    """Return the decode steps that each sequence is planned with, in the order of their indices; at least 1.

    One less than the predicted tokens, and within its limit: the first token comes from the prompt's logits and needs
    no step. A sequence without a prediction counts as the mean of the others; without any, all count the same.
    """
    known = [sequence.predicted for sequence in waiting if sequence.predicted is not None]
    mean = sum(known) / len(known) if known else 1.0
    return {
        s: max(1, min(round(mean if s.predicted is None else s.predicted), s.limit) - 1)
        for s in sorted(waiting, key=lambda sequence: sequence.index)
    }


class Fifo:
    """First come, first served, by the requests' order; the base of all fixed orders."""

    needs_lengths = False
    sign = 0

    def start(self, waiting: Seq[Sequence], slots: int, refills: bool) -> None:
        steps = planned_steps(waiting)
        self._queue = deque(sorted(steps, key=lambda sequence: self.sign * steps[sequence]))

    def next(self, running: Seq[Sequence]) -> Sequence:
        return self._queue.popleft()


class Sjf(Fifo):
    """Shortest predicted job first, Infinite Sampling's refill rule: the best mean waiting time, a poor makespan."""

    needs_lengths = True
    sign = 1


class Lpt(Fifo):
    """Longest predicted job first: makespan at most 4/3 - 1/(3 slots) of the optimum when the predictions are true."""

    needs_lengths = True
    sign = -1


class Fptas:
    """A list of sequences for each slot, planned at the start so that all lists end together, and followed at run time.

    Infinite Sampling's "FPTAS" stage; what exactly the paper minimises is not public. Here it is the makespan of the
    predicted lengths (`assign`). A free slot takes the next of the list whose sequence has ended; with an empty list it
    takes the shortest of the others, as published. While predictions are true this never makes the plan longer: the
    sequence starts no later than it would have. In rounds, and without a prediction, there are no lists, and the
    longest go first.
    """

    needs_lengths = True

    def __init__(self, *, epsilon: Annotated[float, Field(gt=0)]) -> None:
        self._epsilon = epsilon

    def start(self, waiting: Seq[Sequence], slots: int, refills: bool) -> None:
        steps, self._lists = planned_steps(waiting), list[list[Sequence]]()
        if refills and any(sequence.predicted is not None for sequence in waiting):
            jobs = [*steps]
            self._lists = [[jobs[i] for i in places] for places in assign([*steps.values()], slots, self._epsilon)]
        self._latest: list[Sequence | None] = [None] * len(self._lists)  # the sequence of each list that started last
        sign = 1 if self._lists else -1
        self._waiting = dict.fromkeys(sorted(steps, key=lambda sequence: sign * steps[sequence]))

    def next(self, running: Seq[Sequence]) -> Sequence:
        busy = set[Sequence | None](running)
        place = next((place for place, latest in enumerate(self._latest) if latest not in busy), None)
        own = [] if place is None else self._lists[place]
        found = next(sequence for sequence in chain(own, self._waiting) if sequence in self._waiting)
        del self._waiting[found]
        if place is not None:
            self._latest[place] = found
        return found
