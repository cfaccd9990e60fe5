"""Admission of sequences: at most so many at a time, in the scheduler's order, and no more than memory has room for."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from grpo_cli.engine.kv_cache import BLOCK, PagedCache, blocks_for
from grpo_cli.engine.scheduling import Scheduler
from grpo_cli.engine.sequence import Sequence


class Admission:
    """The waiting sequences of one `generate`, and how many may run: `slots` at a time. With `refills` a waiting one
    takes the place of each that ends (continuous batching), else all of a round end before the next one begins.

    A sequence that the scheduler has chosen may have to wait for room: it stays ahead of all that are chosen later, and
    the scheduler is asked for others that can begin now. So its plans are always carried out eventually.
    """

    def __init__(self, slots: int, refills: bool, memory: Memory | None = None) -> None:
        self._slots, self._refills, self._memory = slots, refills, memory
        self._waiting = set[Sequence]()  # and not chosen yet
        self._chosen: list[Sequence] = []  # waiting for room
        self._back: list[Sequence] = []  # waiting for a slot in which they go on

    def __len__(self) -> int:
        return len(self._waiting) + len(self._chosen) + len(self._back)

    def start(self, scheduler: Scheduler, waiting: Seq[Sequence]) -> None:
        """Serve these sequences in the scheduler's order."""
        self._scheduler = scheduler
        self._waiting = set(waiting)
        slots = self._slots if self._memory is None else self._memory.rows(waiting, self._slots)
        scheduler.start(waiting, slots, self._refills)

    def admit(self, running: Seq[Sequence]) -> list[Sequence]:
        """Return the sequences that begin, or go on, now."""
        back, self._back = self._back, []
        free = self._slots - len(running) - len(back)
        if free < 0:
            back, self._back = back[:free], back[free:]
        if back:
            return back
        if free <= 0 or not len(self) or (running and not self._refills):
            return []
        if self._memory is not None and self._memory.is_full(running):
            return []
        entering = list[Sequence]()

        def try_to_enter(sequence: Sequence) -> None:
            can = len(entering) < free and (self._memory is None or self._memory.admits(sequence))
            (entering if can else self._chosen).append(sequence)

        chosen, self._chosen = self._chosen, []
        for sequence in chosen:
            try_to_enter(sequence)
        while self._waiting and len(entering) < free:
            sequence = self._scheduler.next([*running, *entering])
            assert sequence in self._waiting, "a scheduler returns waiting sequences, once each"
            self._waiting.remove(sequence)
            try_to_enter(sequence)
        assert entering or running, "something enters when nothing runs"
        return entering

    def first(self, sequence: Sequence) -> None:
        """Put a preempted sequence before all others."""
        self._chosen.insert(0, sequence)

    def go_on(self, sequence: Sequence) -> None:
        """Let a paused sequence go on, whatever waits."""
        self._back.append(sequence)


class Memory:
    """A cache with a bound, and the lengths that are expected of the sequences in it: room is for what runs, now and,
    by forecast, at its peak.

    The mean length of finished rollouts is biased, since short ones finish first. So the mean is of all tokens made,
    including unfinished rollouts', per finished rollout; it starts as if one of half the limit had finished. `most` is
    the limit; `capacity` the most keys of a sequence, as many as it is expected to hold if they are `evicted`.
    `reserve`: blocks for sequences that will pause.
    """

    def __init__(self, cache: PagedCache, most: int, prefix: int, capacity: int, evicted: bool) -> None:
        self.reserve = self.paused_blocks = 0
        self.was_exhausted = False  # and no rollout has ended since
        self._cache, self._most, self._prefix, self._capacity, self._evicted = cache, most, prefix, capacity, evicted
        self._ended, self._tokens = 1, most / 2

    def ended(self, tokens: int) -> None:
        self._ended += 1
        self._tokens += tokens
        self.was_exhausted = False

    @property
    def free(self) -> int:
        """Blocks that running sequences can take."""
        return len(self._cache.free) - max(0, self.reserve - self.paused_blocks)

    def rows(self, waiting: Seq[Sequence], slots: int) -> int:
        """Roughly how many of them will run at a time."""
        if not waiting:
            return slots
        longest = blocks_for(max(sequence.prompt_length for sequence in waiting))
        self._in_flight = 0
        lengths = [BLOCK * blocks_for(self._capacity) if self._evicted else self._length(s) for s in waiting]
        return max(1, min(slots, int(BLOCK * self._room(longest) * len(lengths) / sum(lengths))))

    def is_full(self, running: Seq[Sequence]) -> bool:
        """True if no other sequence can begin beside these; if not, `admits` counts from here."""
        self._in_flight = sum(sequence.made for sequence in running)
        self._made = [sequence.made for sequence in running]
        self._lengths = [self._length(sequence) for sequence in running]
        self._prompts = {s.request.prompt.id: len(s.prompt.blocks) for s in running if s.prompt is not None}
        self._blocks = 0  # that those who begin take now
        return bool(running) and (self.was_exhausted or not self._fits(self._made, self._lengths, self._prompts))

    def admits(self, sequence: Sequence) -> bool:
        """Add a sequence, if it fits; returns whether it did."""
        name, is_first = sequence.request.prompt.id, not self._made
        made, lengths = [*self._made, sequence.made], [*self._lengths, self._length(sequence)]
        prompts = self._prompts | {name: blocks_for(sequence.prompt_length)}
        if not is_first and not self._fits(made, lengths, prompts):
            return False
        blocks = blocks_for(sequence.held + 1) - len(sequence.blocks)
        blocks += prompts[name] if name not in self._cache.prompts and name not in self._prompts else 0
        while self.free < self._blocks + blocks:
            if not self._cache.drop_idle_prompts({*prompts}):
                assert not is_first, "there is room for one sequence"
                return False
        self._made, self._lengths, self._prompts = made, lengths, prompts
        self._blocks += blocks
        return True

    def _length(self, sequence: Sequence) -> int:
        """Return the expected final length of a sequence. One that exceeds it is expected to continue for half the
        mean."""
        mean = (self._tokens + self._in_flight) / self._ended
        expected = mean if sequence.predicted is None else self._prefix + sequence.predicted
        return min(self._most, max(round(expected), len(sequence.tokens) + max(1, round(mean / 2))))

    def _room(self, prompt_blocks: int) -> int:
        return self._cache.count - max(self.reserve, self.paused_blocks) - prompt_blocks

    def _fits(self, made: Seq[int], lengths: Seq[int], prompts: dict[str, int]) -> bool:
        """True if the peak fits; on average half of each row's last block is empty."""
        room = self._room(sum(prompts.values()))
        if self._evicted:
            return len(made) * blocks_for(self._capacity) <= room
        return fullest(np.array(made), np.array(lengths)) + len(made) * BLOCK // 2 <= room * BLOCK


def fullest(made: np.ndarray, lengths: np.ndarray) -> int:
    """Return the most tokens held at a time by rows that have made `made` and end at `lengths`, one token per step.

    >>> fullest(np.array([0, 2]), np.array([4, 4]))  # in two steps 2 and 4, in four 4 and nothing
    6
    """
    left = np.sort(lengths - made)
    order = np.argsort(lengths - made)
    after = np.cumsum(made[order][::-1])[::-1] + left * np.arange(len(left), 0, -1)
    return int(after.max(initial=0))
