"""Which keys the tokens of each rollout attended to, from what evictions left: for a learner that is to see the same.

A key that was evicted never comes back, so one number for each key says all (`types.View`). What an eviction left is
fetched without a wait, and read when the rollout has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from grpo_cli.engine.kv.keeper import Due
from grpo_cli.model.transfer import Fetched
from grpo_cli.types import NEVER, View

# An eviction of one row: the row of what was fetched, its shape [L, H, B], and `first` and `now` as in `Due`.
_Eviction = tuple[Fetched, int, tuple[int, int, int], int, int]


class Views:
    """Of the sequences that are `asked` about; nothing is recorded of others."""

    def __init__(self, asked: Collection[int]) -> None:
        self._asked = frozenset(asked)
        self._evictions: dict[int, list[_Eviction]] = {}

    def begin(self, sequence: int) -> None:
        """It begins, perhaps anew."""
        self._evictions.pop(sequence, None)

    def note(self, sequences: Sequence[int], due: Due, stay: Sequence[Tensor]) -> None:
        """These were cut down, to the candidates in `stay` (see `Keeper.evict`)."""
        if self._asked.isdisjoint(sequences):
            return
        rows = zip(sequences, due.first.tolist(), due.now.tolist(), strict=True)
        for kept in stay:
            layers, count, heads, left = kept.shape
            fetched = Fetched(kept.transpose(0, 1).reshape(count, -1))
            for row, (sequence, first, now) in zip(range(count), rows, strict=False):
                if sequence in self._asked:
                    eviction = fetched, row, (layers, heads, left), first, now
                    self._evictions.setdefault(sequence, []).append(eviction)

    def of(self, sequence: int, tokens: int) -> View | None:
        """Of a sequence that has ended with `tokens`, its prompt's included; None if it has seen all of them."""
        evictions = self._evictions.pop(sequence, None)
        if evictions is None:
            return None
        layers, heads, _ = evictions[0][2]
        until = np.full((layers, heads, tokens), NEVER, dtype=np.int32)
        for fetched, row, shape, first, now in evictions:
            (kept,) = fetched.read()
            # The candidates were all that was left from `first` on, in order of position, as many for each head.
            held = first + np.nonzero(until[..., first:now] == NEVER)[2].reshape(layers, heads, -1)
            stays = np.take_along_axis(held, kept[row].reshape(shape), axis=-1)
            np.put_along_axis(until, held, now, axis=-1)
            np.put_along_axis(until, stays, NEVER, axis=-1)
        return View(until.tobytes(), layers, heads)
