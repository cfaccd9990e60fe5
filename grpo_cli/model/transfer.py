"""Transfers between host and device: on a GPU one copy each way, from and to pinned memory.

Sending does not wait, reading does. On a CPU both are views of the same memory.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def send(device: torch.device, *tables: np.ndarray) -> list[Tensor]:
    """Return the tables, all of 8-byte numbers, on the device."""
    if device.type == "cpu":
        return [torch.from_numpy(table) for table in tables]
    flat = np.concatenate([np.ascontiguousarray(table).reshape(-1).view(np.int64) for table in tables])
    # The pinned copy may be dropped at once: its memory is reused only after the device has read it.
    arrived = torch.from_numpy(flat).pin_memory().to(device, non_blocking=True)
    parts = arrived.split([table.size for table in tables])
    return [
        (part.view(torch.float64) if table.dtype == np.float64 else part).view(table.shape)
        for part, table in zip(parts, tables, strict=True)
    ]


def read(*columns: Tensor) -> list[np.ndarray]:
    """Return columns [R] on the host: integers below 2^31, float32."""
    if columns[0].device.type == "cpu":
        return [column.numpy() for column in columns]
    numbers = [c if c.dtype == torch.float32 else c.int().view(torch.float32) for c in columns]
    rows = torch.stack(numbers).cpu().numpy()
    return [row if c.dtype == torch.float32 else row.view(np.int32) for row, c in zip(rows, columns, strict=True)]
