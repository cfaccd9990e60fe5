"""Which keys the tokens of each rollout attended to, from what evictions left: for a learner that is to see the same.

A key that was evicted never comes back, so one number for each key says all (`types.View`). What an eviction left is
fetched without a wait, and read at the rollout's next eviction, or its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Int32
from torch import Tensor

from grpo_cli.engine.kv.keeper import Due
from grpo_cli.model.transfer import Fetched
from grpo_cli.types import NEVER, View


@dataclass(frozen=True)
class _Eviction:
    """Of one row. `read` gives what stays, for each row that was cut down with it; `first` and `now` as in `Due`."""

    read: Callable[[], list[np.ndarray]]
    row: int
    shape: tuple[int, int, int]  # [layers, heads, keys that stay]
    first: int
    now: int


class Views:
    """Of the sequences that are `asked` about; nothing is recorded of others."""

    def __init__(self, asked: Collection[int]) -> None:
        self._asked = frozenset(asked)
        self._until: dict[int, Int32[np.ndarray, "L H T"]] = {}  # up to the last eviction that was read
        self._unread: dict[int, _Eviction] = {}

    def begin(self, sequence: int) -> None:
        """It begins, perhaps anew."""
        self._until.pop(sequence, None)
        self._unread.pop(sequence, None)

    def note(self, sequences: Sequence[int], due: Due, stay: Sequence[Tensor]) -> None:
        """These were cut down, to the candidates in `stay` (see `Keeper.evict`)."""
        if self._asked.isdisjoint(sequences):
            return
        rows = zip(sequences, due.first.tolist(), due.now.tolist(), strict=True)
        for kept in stay:
            layers, count, heads, left = kept.shape
            read = cache(Fetched(*kept.transpose(0, 1).reshape(count, -1)).read)
            for row, (sequence, first, now) in zip(range(count), rows, strict=False):
                if sequence in self._asked:
                    self._read(sequence)
                    self._unread[sequence] = _Eviction(read, row, (layers, heads, left), first, now)

    def of(self, sequence: int, tokens: int) -> View | None:
        """Of a sequence that has ended with `tokens`, its prompt's included; None if it has seen all of them."""
        self._read(sequence)
        until = self._until.pop(sequence, None)
        if until is None:
            return None
        layers, heads, _ = until.shape
        return View(_longer(until, tokens).tobytes(), layers, heads)

    def _read(self, sequence: int) -> None:
        one = self._unread.pop(sequence, None)
        if one is None:
            return
        layers, heads, _ = one.shape
        before = self._until.get(sequence, np.zeros((layers, heads, 0), dtype=np.int32))
        until = self._until[sequence] = _longer(before, one.now)
        # The candidates were all that was left from `first` on, in order of position, as many for each head.
        held = one.first + np.nonzero(until[..., one.first :] == NEVER)[2].reshape(layers, heads, -1)
        stays = np.take_along_axis(held, one.read()[one.row].reshape(one.shape), axis=-1)
        np.put_along_axis(until, held, one.now, axis=-1)
        np.put_along_axis(until, stays, NEVER, axis=-1)


def _longer(until: Int32[np.ndarray, "L H T"], tokens: int) -> Int32[np.ndarray, "L H N"]:
    layers, heads, known = until.shape
    return np.concatenate([until, np.full((layers, heads, tokens - known), NEVER, dtype=np.int32)], axis=2)
