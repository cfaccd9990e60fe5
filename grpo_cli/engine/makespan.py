"""Divides jobs of known lengths among slots so that the last slot ends as early as possible (P || C_max).

Pure planning on integers. Deterministic; jobs of equal length are distinguished only by their index, so reordering the
jobs reorders the lists and changes no length in them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Lists = list[list[int]]  # the jobs of each slot, by their place in the list of lengths

DYNAMIC_SLOTS = 3
"""The most slots for which the dynamic programme is tried: its states grow as (jobs / epsilon) ** (slots - 1)."""

EXACT_WORK = 1 << 18
"""The most work that `even_split` divides exactly; beyond it, lengths are counted in units of several steps."""

WORTHWHILE = 0.001
"""A share of the makespan too small to start the dynamic programme for: any predicted length is further off."""


@dataclass(frozen=True)
class Assignment:
    """The jobs of each slot.

    `lists[slot]` holds places in the list of lengths, longest first. `guarantee` is a proven bound on makespan /
    optimum: 1 means that nothing better exists.
    """

    lists: tuple[tuple[int, ...], ...]
    makespan: int
    lower_bound: int
    guarantee: float

    @property
    def bound_ratio(self) -> float:
        """Makespan over lower bound; 1 is as good as can be, and not always reachable."""
        return self.makespan / self.lower_bound


def lower_bound(lengths: Sequence[int], slots: int) -> int:
    """No schedule is shorter than its longest job, nor than an equal share of all the work."""
    return max(max(lengths), -(-sum(lengths) // slots))


def proven_lower_bound(lengths: Sequence[int], slots: int) -> int:
    """Return a bound at least as high as `lower_bound`, from two more arguments.

    Among the `k * slots + 1` longest jobs, some `k + 1` share a slot, and those take at least as long as the shortest
    `k + 1` of them (with 3 jobs of 10 on 2 slots: 20, where an equal share says 15). And every load is a multiple of
    the greatest common divisor of the lengths.
    """
    ordered = sorted(lengths, reverse=True)
    bound = lower_bound(ordered, slots)
    for shared in range(1, (len(ordered) - 1) // slots + 1):
        last = shared * slots
        bound = max(bound, sum(ordered[last - shared : last + 1]))
    divisor = math.gcd(*ordered)
    return -(-bound // divisor) * divisor


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


def resplit(start: Lists, lengths: Sequence[int], target: int) -> Lists:
    """Improve lists: split the jobs of the fullest slot and another one again, as evenly as these two can be.

    Repeated until the fullest slot gains from no partner or holds no more than `target`. A split covers all moves and
    swaps between the two slots, of any number of jobs, at once. The makespan never grows; a round costs about 20
    microseconds per partner at 16 jobs of up to 1024.
    """
    lists = [list(jobs) for jobs in start]
    loads = [sum(lengths[job] for job in jobs) for jobs in lists]
    slots = range(len(lists))
    while max(loads) > target:
        fullest = max(slots, key=lambda slot: (loads[slot], -slot))
        for partner in sorted(slots, key=lambda slot: (loads[slot], slot)):
            if loads[partner] + 1 >= loads[fullest]:
                return lists  # it and all after it are as full (the fullest is among them): no split can help
            larger, smaller = even_split(lists[fullest] + lists[partner], lengths)
            load = sum(lengths[job] for job in larger)
            if load < loads[fullest]:
                lists[fullest], lists[partner] = larger, smaller
                loads[partner] += loads[fullest] - load
                loads[fullest] = load
                break
    return lists


def even_split(jobs: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the two halves of `jobs` whose loads differ least, the larger first: exact up to `EXACT_WORK` of work.

    `sums[i]` has bit s set when some of the first i jobs add up to s; one shift and one `or` per job.
    """
    unit = -(-sum(lengths[job] for job in jobs) // EXACT_WORK)
    sizes = [lengths[job] // unit for job in jobs]
    up_to_half = (1 << (sum(sizes) // 2 + 1)) - 1
    sums = [1]
    for size in sizes:
        sums.append((sums[-1] | sums[-1] << size) & up_to_half)
    rest = sums[-1].bit_length() - 1
    halves: tuple[list[int], list[int]] = ([], [])
    for place in range(len(jobs) - 1, -1, -1):
        in_smaller = not sums[place] >> rest & 1
        halves[in_smaller].append(jobs[place])
        rest -= sizes[place] * in_smaller
    larger, smaller = halves
    if sum(lengths[job] for job in larger) < sum(lengths[job] for job in smaller):
        return smaller, larger
    return larger, smaller


def trimmed_programme(
    lengths: Sequence[int], slots: int, epsilon: float, below: int, max_states: int
) -> tuple[Lists | None, bool]:
    """Return the trimmed dynamic programme over slot loads: an FPTAS for a fixed number of slots (Horowitz and Sahni).

    A state is the loads after the first i jobs, in any order. States whose sorted loads fall into the same cells of
    width `epsilon * lower_bound / jobs` are merged, keeping the real loads of one; as each merge moves a load by less
    than a cell, the result is below (1 + epsilon) times the optimum. States that reach `below`, a makespan already in
    hand, are dropped: if that loses the merged optimum, what is in hand is within the same factor.

    Returns the lists (None if none is better than `below`), and whether it ran to its end: it is given up, and proves
    nothing, when it has more than `max_states` states after a job.
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
            return None, len(kept) == 0
        loads, choices = grown[kept], np.hstack([choices[kept // slots], kept[:, None] % slots])
    best = choices[loads.max(axis=1).argmin()]
    return [[job for job, chosen in zip(order, best, strict=True) if chosen == slot] for slot in range(slots)], True


def assign(lengths: Sequence[int], slots: int, epsilon: float, max_states: int) -> Assignment:
    """LPT's lists, improved by `resplit`, or by the trimmed dynamic programme for up to three slots.

    Each is tried only while the ones before it leave something to gain over the proven lower bound (for the programme:
    more than `WORTHWHILE`); two slots are divided exactly. The guarantee is (1 + epsilon) where the programme ran to
    its end, LPT's 4/3 - 1/(3 slots) otherwise, or makespan / proven bound where that is better. Lengths are at least 1.
    """
    assert slots >= 1 and lengths and min(lengths) >= 1, "a plan needs a slot and jobs that take time"
    bound = proven_lower_bound(lengths, slots)
    best, guarantee = lpt(lengths, slots), 4 / 3 - 1 / (3 * slots)
    if makespan(best, lengths) > bound:
        if slots == 2 and sum(lengths) <= EXACT_WORK:
            best, guarantee = list(even_split(longest_first(lengths), lengths)), 1.0
        else:
            best = resplit(best, lengths, bound)
    in_hand = makespan(best, lengths)
    if in_hand / bound - 1 > min(epsilon, WORTHWHILE) and guarantee > 1 and slots <= DYNAMIC_SLOTS:
        found, complete = trimmed_programme(lengths, slots, epsilon, in_hand, max_states)
        best = found or best
        guarantee = min(guarantee, 1 + epsilon) if complete else guarantee
    longest = makespan(best, lengths)
    return Assignment(
        lists=tuple(tuple(sorted(jobs, key=lambda job: (-lengths[job], job))) for jobs in best),
        makespan=longest,
        lower_bound=lower_bound(lengths, slots),
        guarantee=min(guarantee, longest / bound),
    )
