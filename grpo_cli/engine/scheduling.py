"""The order in which waiting sequences get slots. A scheduler changes time, never tokens; only the engine acts.

All of them read the predicted lengths once, when a `generate` starts. None leaves a slot empty while a sequence waits,
so any of them is within 2 - 1/slots of the shortest possible makespan, whatever was predicted (Graham).

With continuous sampling the decode steps are the makespan of the lengths on the slots: `lpt` is good there, `fptas`
close to the optimum (as far as the predictions are true; `lpt` bears their errors better), and `sjf`, the published
refill rule, the worst, because its longest sequences start last. In rounds (`micro` sampling) they are the sum of the
longest length of each round, which is least for the longest first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence as Seq
from itertools import chain
from typing import Annotated, Protocol, runtime_checkable

import numpy as np
from pydantic import Field

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


# The division of jobs of known lengths among slots so that the last slot ends as early as possible (P || C_max).

Lists = list[list[int]]  # the jobs of each slot, by their place in the list of lengths

# The most slots for which the dynamic programme is tried: its states grow as (jobs / epsilon) ** (slots - 1).
DYNAMIC_SLOTS = 3
MAX_STATES = 20_000


def lower_bound(lengths: Seq[int], slots: int) -> int:
    """Return a lower bound of the makespan: the longest job, or an equal share of all the work."""
    return max(max(lengths), -(-sum(lengths) // slots))


def makespan(lists: Seq[Seq[int]], lengths: Seq[int]) -> int:
    """Return the load of the fullest slot."""
    return max(sum(lengths[job] for job in jobs) for jobs in lists)


def lpt(lengths: Seq[int], slots: int) -> Lists:
    """Return the jobs of each slot, each given to the least loaded, the longest first: at most 4/3 - 1/(3 slots) of
    the optimum (Graham)."""
    lists: Lists = [[] for _ in range(slots)]
    loads = [(0, slot) for slot in range(slots)]
    for job in sorted(range(len(lengths)), key=lambda job: -lengths[job]):
        load, slot = loads[0]
        lists[slot].append(job)
        heapq.heapreplace(loads, (load + lengths[job], slot))
    return lists


def trimmed_programme(lengths: Seq[int], slots: int, epsilon: float, below: int, max_states: int) -> Lists | None:
    """Return each slot's jobs by a trimmed dynamic programme over slot loads: an FPTAS for a fixed number of slots
    (Horowitz and Sahni).

    A state is the loads after the first i jobs, in any order. States whose sorted loads fall into the same cells of
    width `epsilon * lower_bound / jobs` are merged, keeping the real loads of one; as each merge moves a load by less
    than a cell, the result is below (1 + epsilon) times the optimum. States that reach `below`, a makespan already in
    hand, are dropped: if that loses the merged optimum, what is in hand is within the same factor.

    Returns None if no list is better than `below`, or if there are more than `max_states` states after a job.
    """
    order = sorted(range(len(lengths)), key=lambda job: -lengths[job])
    # Loads are whole: a smaller cell would merge nothing.
    cell = max(1.0, epsilon * lower_bound(lengths, slots) / len(lengths))
    loads, choices = np.zeros((1, slots), dtype=np.int64), np.zeros((1, 0), dtype=np.int64)
    for job in order:
        grown = (loads[:, None] + lengths[job] * np.eye(slots, dtype=np.int64)).reshape(-1, slots)
        alive = np.flatnonzero(grown.max(axis=1) < below)
        _, first = np.unique(np.sort(grown[alive] // cell, axis=1), axis=0, return_index=True)
        kept = alive[first]
        if len(kept) == 0 or len(kept) > max_states:
            return None
        loads, choices = grown[kept], np.hstack([choices[kept // slots], kept[:, None] % slots])
    best = choices[loads.max(axis=1).argmin()]
    return [[job for job, chosen in zip(order, best, strict=True) if chosen == slot] for slot in range(slots)]


def assign(lengths: Seq[int], slots: int, epsilon: float, max_states: int = MAX_STATES) -> Lists:
    """Return LPT's lists, or for up to three slots better ones of the trimmed programme; in each list the longest
    jobs are first. Lengths are at least 1."""
    assert slots >= 1 and lengths and min(lengths) >= 1, "a plan needs a slot and jobs that take time"
    best = lpt(lengths, slots)
    in_hand = makespan(best, lengths)
    if slots <= DYNAMIC_SLOTS and in_hand > 1.001 * lower_bound(lengths, slots):  # predictions are further off
        best = trimmed_programme(lengths, slots, epsilon, in_hand, max_states) or best
    return best
