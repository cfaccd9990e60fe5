"""Divides jobs of known lengths among slots so that the last slot ends as early as possible (P || C_max).

Pure planning on integers. Deterministic; jobs of equal length are distinguished only by their index, so reordering the
jobs reorders the lists and changes no length in them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Lists = list[list[int]]  # the jobs of each slot, by their place in the list of lengths

# The most slots for which the dynamic programme is tried: its states grow as (jobs / epsilon) ** (slots - 1).
DYNAMIC_SLOTS = 3
# A share of the makespan too small to start it for: any predicted length is further off.
WORTHWHILE = 0.001


def lower_bound(lengths: Sequence[int], slots: int) -> int:
    """No schedule is shorter than its longest job, nor than an equal share of all the work."""
    return max(max(lengths), -(-sum(lengths) // slots))


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return the jobs by falling length, equal ones by their place."""
    return sorted(range(len(lengths)), key=lambda job: (-lengths[job], job))


def makespan(lists: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """Return the load of the fullest slot."""
    return max(sum(lengths[job] for job in jobs) for jobs in lists)


def lpt(lengths: Sequence[int], slots: int) -> Lists:
    """Longest job first, each to the slot with the least load: at most 4/3 - 1/(3 slots) of the optimum (Graham)."""
    lists: Lists = [[] for _ in range(slots)]
    loads = [(0, slot) for slot in range(slots)]
    for job in longest_first(lengths):
        load, slot = loads[0]
        lists[slot].append(job)
        heapq.heapreplace(loads, (load + lengths[job], slot))
    return lists


def trimmed_programme(lengths: Sequence[int], slots: int, epsilon: float, below: int, max_states: int) -> Lists | None:
    """Return the trimmed dynamic programme over slot loads: an FPTAS for a fixed number of slots (Horowitz and Sahni).

    A state is the loads after the first i jobs, in any order. States whose sorted loads fall into the same cells of
    width `epsilon * lower_bound / jobs` are merged, keeping the real loads of one; as each merge moves a load by less
    than a cell, the result is below (1 + epsilon) times the optimum. States that reach `below`, a makespan already in
    hand, are dropped: if that loses the merged optimum, what is in hand is within the same factor.

    Returns None if no list is better than `below`, or if there are more than `max_states` states after a job.
    """
    order = longest_first(lengths)
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


def assign(lengths: Sequence[int], slots: int, epsilon: float, max_states: int) -> Lists:
    """Return LPT's lists, or for up to three slots better ones of the trimmed programme; in each list the longest
    jobs are first. Lengths are at least 1."""
    assert slots >= 1 and lengths and min(lengths) >= 1, "a plan needs a slot and jobs that take time"
    best = lpt(lengths, slots)
    in_hand = makespan(best, lengths)
    if slots <= DYNAMIC_SLOTS and in_hand / lower_bound(lengths, slots) - 1 > min(epsilon, WORTHWHILE):
        best = trimmed_programme(lengths, slots, epsilon, in_hand, max_states) or best
    return best
