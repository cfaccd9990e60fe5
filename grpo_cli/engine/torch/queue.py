"""The sequences that wait for a slot; the scheduler chooses which enters next, once there is room for it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from grpo_cli.engine.interfaces import Plan, Running, Scheduler, Waiting
from grpo_cli.engine.torch.sequence import Sequence


class WaitingQueue:
    """The sequences that wait. The scheduler no longer sees one that it has chosen, as if it ran.

    If memory is bounded, a chosen sequence may have to wait for room: it stays here, ahead of all that are chosen
    later, and the scheduler is asked for others that can begin now. So its plans are always carried out eventually.
    """

    def __init__(self, sequences: Seq[Sequence], scheduler: Scheduler, slots: int) -> None:
        self._scheduler = scheduler
        self._sequences = {sequence.index: sequence for sequence in sequences}
        self._views = {sequence.index: _view(sequence) for sequence in sequences}  # of those not chosen yet
        self._chosen: list[Sequence] = []  # waiting for room
        scheduler.start(tuple(self._views.values()), slots)

    def __len__(self) -> int:
        return len(self._views) + len(self._chosen)

    def leave(
        self, running: Seq[Running], free: Seq[int], may_begin: Callable[[Sequence], bool]
    ) -> list[tuple[int, Sequence]]:
        """Which sequences enter which of the free slots now: each chosen one for which `may_begin` is true."""
        free, entering = list(free), list[tuple[int, Sequence]]()
        chosen, self._chosen = self._chosen, []
        for sequence in chosen:
            if free and may_begin(sequence):
                entering.append((free.pop(0), sequence))
            else:
                self._chosen.append(sequence)
        asking = True
        while asking and free and self._views:
            busy = [*running, *(_running(slot, sequence) for slot, sequence in entering)]
            plan = self._scheduler.plan(tuple(self._views.values()), busy, tuple(free))
            self._check(plan, free, idle=not busy)
            asking = False
            for index, slot in plan.admit:
                sequence = self._sequences[index]
                del self._views[index]
                if may_begin(sequence):
                    free.remove(slot)
                    entering.append((slot, sequence))
                else:
                    self._chosen.append(sequence)
                    asking = True
        assert entering or running, "something enters when nothing runs"
        return entering

    def give_back(self, sequence: Sequence) -> None:
        """A sequence that had to leave before its end: it comes before all others."""
        self._chosen.insert(0, sequence)

    def _check(self, plan: Plan, free: Seq[int], idle: bool) -> None:
        """Check a plan before acting on it."""
        indices, slots = [index for index, _ in plan.admit], [slot for _, slot in plan.admit]
        assert len(set(indices)) == len(indices) and all(index in self._views for index in indices), (
            "a plan admits waiting sequences, once each"
        )
        assert len(set(slots)) == len(slots) and set(slots) <= set(free), "a plan gives each free slot once"
        assert indices or not idle, "a scheduler must admit a request when nothing is running"


def _view(sequence: Sequence) -> Waiting:
    request = sequence.request
    return Waiting(sequence.index, request.prompt.id, request.sampling.max_new_tokens, sequence.predicted)


def _running(slot: int, sequence: Sequence) -> Running:
    return Running(sequence.index, slot, sequence.made, sequence.predicted)
