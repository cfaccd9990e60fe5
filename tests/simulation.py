"""The torch engine's clock without a model: how many decode steps a scheduler takes for these true lengths.

As in the engine, a request of L tokens holds a slot for L - 1 decode steps (its first token comes from the prompt's
logits), and a free slot is refilled for the next step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_cli.engine.makespan import lower_bound
from grpo_cli.engine.scheduling import Running, Scheduler, Waiting


@dataclass(frozen=True)
class Simulation:
    """The cost of one simulated `generate`. `admitted` has the index, slot and first step of each request."""

    decode_steps: int
    slots: int
    slot_utilisation: float
    lower_bound: int
    admitted: tuple[tuple[int, int, int], ...]

    @property
    def bound_ratio(self) -> float:
        return self.decode_steps / self.lower_bound if self.lower_bound else 1.0


def simulate(
    lengths: Sequence[int], predicted: Sequence[float | None], scheduler: Scheduler, slots: int, rounds: bool = False
) -> Simulation:
    """Run `scheduler`, which sees only `predicted`: when all slots are free (`rounds`), else whenever one is."""
    slots = min(slots, len(lengths))
    steps = [length - 1 for length in lengths]
    waiting = {i: Waiting(i, "", max(lengths), predicted[i]) for i in range(len(lengths))}
    running: list[tuple[int, int, int]] = []  # a heap of (step after its last, slot, index)
    started: dict[int, int] = {}
    admitted: list[tuple[int, int, int]] = []
    free, now = list(range(slots)), 0
    scheduler.start(tuple(waiting.values()), slots)
    while waiting or running:
        if waiting and (not running or not rounds):
            seen = tuple(Running(index, now - started[index], None) for _, _, index in sorted(running))
            plan = scheduler.plan(tuple(waiting.values()), seen, len(free))
            assert plan or running, "a scheduler must admit a request when nothing is running"
            for index in plan:
                del waiting[index]
                slot, started[index] = free.pop(0), now
                admitted.append((index, slot, now))
                heapq.heappush(running, (now + steps[index], slot, index))
        now = running[0][0]
        while running and running[0][0] == now:
            free.append(heapq.heappop(running)[1])
        free.sort()
    busy = sum(steps) / (slots * now) if now else 1.0
    return Simulation(now, slots, busy, lower_bound(steps, slots), tuple(admitted))
