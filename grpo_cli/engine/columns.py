"""Whole numbers of every slot in columns, on the device and mirrored on the host, so that no step has to look there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

Index = slice | Int[Tensor, "R"]  # slots, as the device is told


@dataclass(frozen=True)
class Column:
    """One number of every slot. Both sides are views: whoever reads sees what was set last."""

    device: Int[Tensor, "S"]
    host: np.ndarray

    def get(self, slot: int) -> int:
        return int(self.host[slot])

    def set(self, slots: np.ndarray, index: Int[Tensor, "R"], value: int) -> None:
        """`index` is `slots` for the device, where they cross over once for all columns."""
        self.host[slots] = value
        self.device[index] = value

    def add(self, slots: slice, value: int) -> None:
        self.host[slots] += value
        self.device[slots].add_(value)


class Columns:
    """`mirrored` columns, and `more` that the device changes by itself, which the host has to ask for."""

    def __init__(self, slots: int, mirrored: int, more: int, device: torch.device) -> None:
        self._device = torch.zeros(slots, mirrored + more, dtype=torch.long, device=device)
        self._host = np.zeros((slots, mirrored), dtype=np.int64)
        columns = self._device.unbind(1)
        self.mirrored = tuple(map(Column, columns[:mirrored], self._host.T))
        self.more = columns[mirrored:]

    def put(self, slots: Sequence[int], index: Int[Tensor, "R"], rows: Sequence[Sequence[int]]) -> None:
        """Set all columns of each slot, `more` after the mirrored ones; `index` is `slots` for the device."""
        self._device[index] = torch.tensor(rows, device=index.device)
        self._host[list(slots)] = np.array(rows)[:, : self._host.shape[1]]

    def move(self, source: int, target: int) -> None:
        self._device[target] = self._device[source]
        self._host[target] = self._host[source]
