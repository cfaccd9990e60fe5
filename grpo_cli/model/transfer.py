"""What crosses between host and device: on a GPU as one copy each way, from and to pinned memory.

Sending does not wait, nor does fetching: the result is read when it is needed, and that is the one wait. On
a CPU both are views of the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def send(device: torch.device, *tables: np.ndarray) -> list[Tensor]:
    """The tables, all of 8 bytes a number, on the device."""
    if device.type == "cpu":
        return [torch.from_numpy(table) for table in tables]
    flat = np.concatenate([np.ascontiguousarray(table).reshape(-1).view(np.int64) for table in tables])
    # The pinned copy may be dropped at once: its memory is used again only when the device has read it.
    arrived = torch.from_numpy(flat).pin_memory().to(device, non_blocking=True)
    parts = arrived.split([table.size for table in tables])
    return [
        (part.view(torch.float64) if table.dtype == np.float64 else part).view(table.shape)
        for part, table in zip(parts, tables, strict=True)
    ]


class Fetched:
    """Columns of equal length, whole numbers below 2^31 or float32, on their way to the host."""

    def __init__(self, *columns: Tensor) -> None:
        self._columns = columns
        if columns[0].device.type == "cpu":
            return
        packed = torch.stack([c if c.dtype == torch.float32 else c.int().view(torch.float32) for c in columns])
        self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._host.copy_(packed, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def read(self) -> list[np.ndarray]:
        """Waits until they are there."""
        if self._columns[0].device.type == "cpu":
            return [column.numpy() for column in self._columns]
        self._arrived.synchronize()
        return [
            row if column.dtype == torch.float32 else row.view(np.int32)
            for row, column in zip(self._host.numpy(), self._columns, strict=True)
        ]


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Floating-point numbers of one device, on the host: moved all together, so that it waits once."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    together = torch.cat([tensor.double().reshape(-1) for tensor in tensors]).cpu()
    parts = together.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
