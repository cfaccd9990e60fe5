"""Admission of sequences, in the scheduler's order, as long as there is a free slot and enough memory."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from grpo_cli.engine.kv_cache import BLOCK
from grpo_cli.engine.scheduling import Scheduler
from grpo_cli.engine.sequence import Sequence

TRIES = 8  # sequences that find no room before the rest is left for the next step: each takes tens of microseconds
# Takes the memory that a sequence needs beside those that run; returns False, and takes none, if there is too little.
TryTakeRoom = Callable[[Sequence, Seq[Sequence]], bool]


class Admission:
    """The waiting sequences of one `generate`, and how many may run: `slots` at a time. With `refills` a waiting one
    takes the place of each that ends (continuous batching), else all of a round end, or wait for an environment, first.

    A sequence that waits for room stays ahead of all that are chosen later, while others begin. One that has begun
    before comes first, and may continue while a round still runs.
    """

    def __init__(self, slots: int, refills: bool) -> None:
        self._slots, self._refills = slots, refills
        self._waiting = set[Sequence]()  # and not chosen yet
        self._chosen: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._chosen)

    def start(self, scheduler: Scheduler, waiting: Seq[Sequence]) -> None:
        """Serve these sequences in the scheduler's order."""
        self._scheduler, self._waiting = scheduler, set(waiting)
        scheduler.start(waiting, self._slots, self._refills)

    def admit(self, running: Seq[Sequence], try_take_room: TryTakeRoom = lambda *_: True) -> list[Sequence]:
        """Return the sequences that begin, or continue, now."""
        beside, put_off, may_begin = [*running], list[Sequence](), self._refills or not running
        while len(beside) < self._slots and len(put_off) < TRIES and (self._chosen or may_begin and self._waiting):
            if not self._chosen:
                self._chosen.append(self._scheduler.next(beside))
                self._waiting.remove(self._chosen[0])  # a scheduler returns waiting sequences, once each
            sequence = self._chosen.pop(0)
            can = (may_begin or sequence.tokens) and try_take_room(sequence, beside)
            (beside if can else put_off).append(sequence)
        self._chosen = put_off + self._chosen
        assert beside or not len(self), "something enters when nothing runs"
        return beside[len(running) :]

    def put_first(self, sequence: Sequence) -> None:
        """Let a sequence that has begun continue before all others."""
        self._chosen.insert(0, sequence)


class Forecast:
    """The tokens that sequences will hold, of which each holds at most `keys`.

    The mean length of finished rollouts is biased, since short ones finish first. So the mean is of all tokens made,
    including unfinished rollouts', per finished rollout; it starts as if one of `start` tokens had finished.
    """

    def __init__(self, keys: int, start: float) -> None:
        self._keys, self._finished, self._tokens = keys, 1, start

    def finish(self, tokens: int) -> None:
        """Count a finished rollout of `tokens` tokens."""
        self._finished += 1
        self._tokens += tokens

    def held(self, sequences: Seq[Sequence]) -> float:
        """Return the tokens that they hold together on average from now to their ends, with half of each one's last
        block, which is empty. Each is expected to make at least half the mean more than it has now."""
        computed = np.array([sequence.computed for sequence in sequences])
        mean = (self._tokens + computed.sum()) / self._finished
        expected = [mean if sequence.predicted is None else sequence.predicted for sequence in sequences]
        ends = np.maximum(expected, computed + mean / 2)
        return float((computed.clip(max=self._keys) + ends.clip(max=self._keys) + BLOCK).sum() / 2)
