"""Distributes a number of rollouts among prompts, by gains or in proportion, with exact sums."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def hand_out(gains: Sequence[Sequence[float]], have: Sequence[int], budget: int, rng: np.random.Generator) -> list[int]:
    """Return how many rollouts each prompt has after `budget` more went, one by one, to the largest gains.

    `gains[q][k]` is the gain of prompt q's k-th rollout, up to the length of the list. A prompt without any gets two
    at once, with the total gain `gains[q][2]`, or none. After that its gains must not rise, nor exceed half of it: then
    no other division has a larger total. Ties are broken at random. There has to be room for all, and a list for 3 or
    more. O(budget log prompts).
    """
    counts, turns = list(have), rng.permutation(len(gains)).tolist()

    def entry(problem: int) -> tuple[float, int, int]:
        row, count = gains[problem], counts[problem]
        return (-row[count + 1] if count else -row[2] / 2), turns[problem], problem

    heap = [entry(problem) for problem, row in enumerate(gains) if counts[problem] + 1 < len(row)]
    heapq.heapify(heap)
    while budget:
        assert heap, "there is room for all"
        problem = heap[0][2]
        if counts[problem] == 0 and budget == 1:
            _place_last(gains, counts, turns, problem)
            break
        taken = 1 if counts[problem] else 2
        counts[problem] += taken
        budget -= taken
        if counts[problem] + 1 < len(gains[problem]):
            heapq.heapreplace(heap, entry(problem))
        else:
            heapq.heappop(heap)
    return counts


def _place_last(gains: Sequence[Sequence[float]], counts: list[int], turns: Sequence[int], newcomer: int) -> None:
    """One rollout is left where two are needed: it goes to another prompt, or to the newcomer together with one taken
    from another."""
    begun = [problem for problem, count in enumerate(counts) if count]
    takers = [q for q in begun if counts[q] + 1 < len(gains[q])]
    givers = [q for q in begun if counts[q] > 2]
    taker = max(takers, key=lambda q: (gains[q][counts[q] + 1], turns[q]), default=None)
    giver = min(givers, key=lambda q: (gains[q][counts[q]], turns[q]), default=None)
    if giver is not None:
        traded = gains[newcomer][2] - gains[giver][counts[giver]]
        if taker is None or traded > gains[taker][counts[taker] + 1]:
            counts[giver] -= 1
            counts[newcomer] = 2
            return
    assert taker is not None, "a single rollout has nothing to be compared with"
    counts[taker] += 1


def in_proportion(shares: np.ndarray, total: int, least: int, rng: np.random.Generator) -> list[int]:
    """Return whole numbers of sum `total`, in proportion to the shares (above 0), none below `least`.

    Those that would fall below `least` get it, and the others share the rest. What rounding down leaves goes to the
    largest remainders, with ties broken at random. `total` has to be at least `least` times their number.
    """
    raised = np.zeros(len(shares), dtype=bool)
    while True:
        free = total - least * int(raised.sum())
        exact = np.where(raised, float(least), shares * free / max(shares[~raised].sum(), np.finfo(float).tiny))
        below = ~raised & (exact < least)
        if not below.any():
            break
        raised |= below
    counts = np.floor(exact + 1e-9).astype(np.int64)  # a share of 3 may come out as 2.9999...
    # Compared as rounded, since equal shares need not differ from whole numbers by the same bits.
    remainders = np.where(raised, -1.0, np.round(exact - counts, 9))
    order = np.lexsort((rng.random(len(shares)), -remainders))
    counts[order[: total - int(counts.sum())]] += 1
    return counts.tolist()
