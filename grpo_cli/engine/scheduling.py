"""The order in which waiting sequences get slots. A scheduler changes time, never tokens; only the engine acts.

All of them read the predicted lengths once, when a `generate` starts. None leaves a slot empty while a sequence waits,
so any of them is within 2 - 1/slots of the shortest possible makespan, whatever was predicted (Graham).

With continuous sampling the decode steps are the makespan of the lengths on the slots: `lpt` is good there, `fptas`
close to the optimum (as far as the predictions are true; `lpt` bears their errors better), and `sjf`, the published
refill rule, the worst, because its longest sequences start last.

In rounds (`micro` sampling) the decode steps are the sum of the longest length of each round. That sum is least when
the sequences are cut, longest first, into consecutive rounds: this is `lpt`, and `fptas` is the same. `sjf` cuts from
the other end: as good when the slots divide the sequences evenly, else the incomplete round is made of the longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Annotated, Protocol, runtime_checkable

from pydantic import Field

from grpo_cli.engine.makespan import assign, makespan
from grpo_cli.engine.sequence import Sequence
from grpo_cli.support.ranges import OneOf


@runtime_checkable
class Scheduler(Protocol):
    """Orders the waiting sequences. Schedulers change time, never tokens; where generation stops early (`enough`), they
    decide which rollouts finish in time."""

    @property
    def needs_lengths(self) -> bool:
        """True if it is useless without predicted lengths, and so refused with `predictor=none`."""

    @property
    def details(self) -> Mapping[str, float]:
        """Metrics of the plan that was followed; empty when there are none."""

    def start(self, waiting: Seq[Sequence], slots: int, refills: bool) -> None:
        """Forget the previous `generate` and plan a new one. With `refills` a free slot is taken at once, else all are
        taken together, in rounds."""

    def next(self, running: Seq[Sequence]) -> Sequence:
        """Return the waiting sequence that begins next, beside those that run. It is called for a free slot, at most
        once for each sequence. Under a tight `sampler.kv_budget` the sequence may start later, but never after one that
        was returned later and needs as much memory."""


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
    details: Mapping[str, float] = {}

    def start(self, waiting: Seq[Sequence], slots: int, refills: bool) -> None:
        steps = planned_steps(waiting)
        self._queue = deque(sorted(steps, key=lambda sequence: self.rank(steps[sequence])))

    def next(self, running: Seq[Sequence]) -> Sequence:
        return self._queue.popleft()

    def rank(self, steps: int) -> int:
        """Return the sort key, given the planned steps: the smallest goes first, ties by index."""
        return 0


class Sjf(Fifo):
    """Shortest predicted job first, Infinite Sampling's refill rule: the best mean waiting time, a poor makespan."""

    needs_lengths = True

    def rank(self, steps: int) -> int:
        return steps


class Lpt(Fifo):
    """Longest predicted job first: makespan at most 4/3 - 1/(3 slots) of the optimum when the predictions are true."""

    needs_lengths = True

    def rank(self, steps: int) -> int:
        return -steps


class Fptas:
    """A list of sequences for each slot, planned at the start so that all lists end together, and followed at run time.

    Infinite Sampling's "FPTAS" stage; what exactly the paper minimises is not public. Here it is the makespan of the
    predicted lengths (`makespan.assign`).

    A free slot takes the next, longest first, of the list whose sequence has ended. With an empty list it takes the
    shortest of all that wait (`refill="sjf"`, as published) or the longest. While predictions are true this never makes
    the plan longer: the sequence starts no later than it would have. In rounds, and without a prediction, there are no
    lists, and the longest go first.

    `details` has the plan's makespan, in decode steps.
    """

    needs_lengths = True

    def __init__(
        self,
        *,
        epsilon: Annotated[float, Field(gt=0)],
        max_states: Annotated[int, Field(ge=1)],
        refill: Annotated[str, OneOf(("sjf", "lpt"))],
    ) -> None:
        self._epsilon, self._max_states, self._refill = epsilon, max_states, refill
        self.details: Mapping[str, float] = {}

    def start(self, waiting: Seq[Sequence], slots: int, refills: bool) -> None:
        steps = planned_steps(waiting)
        self._waiting, self._lists, self.details = set(steps), list[deque[Sequence]](), {}
        if refills and any(sequence.predicted is not None for sequence in waiting):
            jobs, lengths = [*steps], [*steps.values()]
            lists = assign(lengths, slots, self._epsilon, self._max_states)
            self._lists = [deque(jobs[place] for place in places) for places in lists]
            self.details = {"engine/plan_makespan": float(makespan(lists, lengths))}
        self._latest: list[Sequence | None] = [None] * len(self._lists)  # that each list has sent out
        sign = 1 if self._lists and self._refill == "sjf" else -1
        self._others = deque(sorted(steps, key=lambda sequence: sign * steps[sequence]))

    def next(self, running: Seq[Sequence]) -> Sequence:
        busy = set[Sequence | None](running)
        place = next((place for place, latest in enumerate(self._latest) if latest not in busy), None)
        found = self._first_of(self._others) if place is None else self._first_of(self._lists[place], self._others)
        if place is not None:
            self._latest[place] = found
        return found

    def _first_of(self, *queues: deque[Sequence]) -> Sequence:
        """Take the first waiting sequence of the first queue that has one."""
        for queue in queues:
            while queue:
                sequence = queue.popleft()
                if sequence in self._waiting:
                    self._waiting.remove(sequence)
                    return sequence
        raise AssertionError("no more sequences begin than wait")
