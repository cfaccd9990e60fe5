"""The division of jobs of known lengths among slots so that the last slot ends as early as possible (P || C_max)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq

import numpy as np

Lists = list[list[int]]  # the jobs of each slot, by their place in the list of lengths

# The most slots for which the dynamic programme is tried: its states grow as (jobs / epsilon) ** (slots - 1).
DYNAMIC_SLOTS = 3
MAX_STATES = 20_000


def lower_bound(lengths: Seq[int], slots: int) -> int:
    """Return a lower bound of the makespan: the longest job, an equal share of all the work, or as many of the shortest
    jobs as some slot has."""
    return max(max(lengths), -(-sum(lengths) // slots), -(-len(lengths) // slots) * min(lengths))


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
    loads, choices = np.zeros((1, slots), dtype=np.int64), np.zeros((1, 0), dtype=np.int8)
    for job in order:
        grown = (loads[:, None] + lengths[job] * np.eye(slots, dtype=np.int64)).reshape(-1, slots)
        alive = np.flatnonzero(grown.max(axis=1) < below)
        _, first = np.unique(np.sort(grown[alive] // cell, axis=1), axis=0, return_index=True)
        kept = alive[first]
        if len(kept) == 0 or len(kept) > max_states:
            return None
        loads, choices = grown[kept], np.hstack([choices[kept // slots], (kept[:, None] % slots).astype(np.int8)])
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
