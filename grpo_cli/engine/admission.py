"""Admission of sequences, in the scheduler's order, as long as there is a free slot and enough memory."""

from __future__ import annotations

from collections.abc import Collection
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
        self._returning: list[Sequence] = []  # waiting for a slot, whatever else waits

    def __len__(self) -> int:
        return len(self._waiting) + len(self._chosen) + len(self._returning)

    def start(self, scheduler: Scheduler, waiting: Seq[Sequence]) -> None:
        """Serve these sequences in the scheduler's order."""
        self._scheduler = scheduler
        self._waiting = set(waiting)
        slots = self._slots if self._memory is None else self._memory.slots_for(waiting, self._slots)
        scheduler.start(waiting, slots, self._refills)

    def admit(self, running: Seq[Sequence]) -> list[Sequence]:
        """Return the sequences that begin, or continue, now."""
        free = self._slots - len(running)
        if self._returning and free > 0:
            returning, self._returning = self._returning[:free], self._returning[free:]
            return returning
        if free <= 0 or not len(self) or (running and not self._refills):
            return []
        if self._memory is not None and self._memory.is_full(running):
            return []
        entering, chosen = list[Sequence](), self._chosen
        self._chosen = []
        while len(entering) < free and (chosen or self._waiting):
            sequence = chosen.pop(0) if chosen else self._next([*running, *entering])
            can = self._memory is None or self._memory.admits(sequence)
            (entering if can else self._chosen).append(sequence)
        self._chosen += chosen
        assert entering or running, "something enters when nothing runs"
        return entering

    def _next(self, running: Seq[Sequence]) -> Sequence:
        sequence = self._scheduler.next(running)
        assert sequence in self._waiting, "a scheduler returns waiting sequences, once each"
        self._waiting.remove(sequence)
        return sequence

    def put_first(self, sequence: Sequence) -> None:
        """Put a preempted sequence before all others."""
        self._chosen.insert(0, sequence)

    def return_soon(self, sequence: Sequence) -> None:
        """Let a paused sequence continue, whatever waits."""
        self._returning.append(sequence)


class Memory:
    """The room under a bound: for the sequences that run, now and, by the lengths expected of them, at their peak.

    The mean length of finished rollouts is biased, since short ones finish first. So the mean is of all tokens made,
    including unfinished rollouts', per finished rollout; it starts as if one of half the `longest` had finished. If it
    `evicts`, each sequence is expected to hold as many keys as it ever may, in `own_blocks`. `paused` sequences keep
    their blocks; `reserve`: blocks for sequences that will pause.
    """

    def __init__(
        self, cache: PagedCache, own_blocks: int, longest: int, prefix: int, evicts: bool, paused: Collection[Sequence]
    ) -> None:
        self.reserve = 0
        self.was_exhausted = False  # and no rollout has ended since
        self._cache, self._own_blocks, self._longest, self._prefix = cache, own_blocks, longest, prefix
        self._evicts, self._paused = evicts, paused
        self._finished, self._tokens, self._in_flight = 1, longest / 2, 0

    def finish(self, tokens: int) -> None:
        """Count a finished rollout of so many tokens."""
        self._finished += 1
        self._tokens += tokens
        self.was_exhausted = False

    @property
    def _paused_blocks(self) -> int:
        return sum(len(sequence.blocks) for sequence in self._paused)

    @property
    def free(self) -> int:
        """Blocks that running sequences can take."""
        return len(self._cache.free) - max(0, self.reserve - self._paused_blocks)

    def slots_for(self, waiting: Seq[Sequence], slots: int) -> int:
        """Estimate how many of them will run at a time."""
        if not waiting:
            return slots
        longest = blocks_for(max(sequence.prompt_length for sequence in waiting))
        self._in_flight = 0
        lengths = [BLOCK * self._own_blocks if self._evicts else self._expected(s) for s in waiting]
        return max(1, min(slots, int(BLOCK * self._room(longest) * len(lengths) / sum(lengths))))

    def is_full(self, running: Seq[Sequence]) -> bool:
        """True if no other sequence can begin beside these; if not, `admits` counts from here."""
        self._in_flight = sum(sequence.made for sequence in running)
        self._made = [sequence.made for sequence in running]
        self._lengths = [self._expected(sequence) for sequence in running]
        self._prompts = {s.request.prompt.id: len(s.prompt.blocks) for s in running if s.prompt is not None}
        self._blocks = 0  # that those who begin take now
        return bool(running) and (self.was_exhausted or not self._fits(self._made, self._lengths, self._prompts))

    def admits(self, sequence: Sequence) -> bool:
        """Add a sequence, if it fits; returns whether it did."""
        name, is_first = sequence.request.prompt.id, not self._made
        made, lengths = [*self._made, sequence.made], [*self._lengths, self._expected(sequence)]
        prompts = self._prompts | {name: blocks_for(sequence.prompt_length)}
        if not is_first and not self._fits(made, lengths, prompts):
            return False
        blocks = blocks_for(sequence.held + 1) - len(sequence.blocks)
        blocks += prompts[name] if name not in self._cache.prompts and name not in self._prompts else 0
        while self.free < self._blocks + blocks:
            if not self._cache.drop_idle_prompts(prompts):
                assert not is_first, "there is room for one sequence"
                return False
        self._made, self._lengths, self._prompts = made, lengths, prompts
        self._blocks += blocks
        return True

    def _expected(self, sequence: Sequence) -> int:
        """Return the expected final length of a sequence; of one that exceeds it, half the mean more."""
        mean = (self._tokens + self._in_flight) / self._finished
        expected = mean if sequence.predicted is None else self._prefix + sequence.predicted
        return min(self._longest, max(round(expected), len(sequence.tokens) + max(1, round(mean / 2))))

    def _room(self, prompt_blocks: int) -> int:
        return self._cache.count - max(self.reserve, self._paused_blocks) - prompt_blocks

    def _fits(self, made: Seq[int], lengths: Seq[int], prompts: dict[str, int]) -> bool:
        """True if the peak fits; on average half of each row's last block is empty."""
        room = self._room(sum(prompts.values()))
        if self._evicts:
            return len(made) * self._own_blocks <= room
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
