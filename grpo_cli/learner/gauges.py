"""What `record.gauges` measures of an update, every `record.gauge_every` steps, and nothing of it otherwise.

    noise      with q_b = |g|^2 of a random half (b of B rows) and q_B of all: the scale S / Q,
               S = (q_b - q_B) / (1/b - 1/B),  Q = (B q_B - b q_b) / (B - b)
    changed    the share of weights whose bfloat16 bits the update has changed

S estimates the trace of a rollout's gradient covariance and Q the true gradient's squared norm (McCandlish et al.,
arXiv 1812.06162): with fewer rollouts in an update than the scale, most of it is noise. Both are averaged over time
before they are divided, newer ones counting more; a resumed run begins the average anew. A step that measures noise
cuts its rows otherwise, so that its gradient is rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_cli.settings import RecordSettings

KEPT = 0.95  # of an average, at each new value


class Gauges:
    """Which gauges a step reads, and the averages so far."""

    def __init__(self, record: RecordSettings) -> None:
        self._names, self._every = frozenset(record.gauges), record.gauge_every
        self._sums = np.zeros(3)  # of S, Q and 1

    def due(self, step: int) -> frozenset[str]:
        """Of step number `step`, from 0."""
        return self._names if step % self._every == 0 else frozenset()

    def noise(self, half: float, rows_of_half: int, whole: float, rows: int) -> dict[str, float]:
        """From squared norms of the mean gradient of some rows and of all. Nothing where there is no noise to see."""
        new = np.array([*noise_of(half, rows_of_half, whole, rows), 1.0])
        self._sums = KEPT * self._sums + (1 - KEPT) * new
        trace, signal = (float(total / self._sums[2]) for total in self._sums[:2])
        found = {"gauge/noise_trace": trace, "gauge/noise_signal": signal}
        return found | ({"gauge/noise_scale": trace / signal} if signal > 0 else {})


def noise_of(half: float, b: int, whole: float, count: int) -> tuple[float, float]:
    """S and Q."""
    return (half - whole) / (1 / b - 1 / count), (count * whole - b * half) / (count - b)


def halves(rows: int, step: int) -> list[Tensor]:
    """A random half of the rows, and the others."""
    order = torch.from_numpy(np.random.default_rng([step, rows]).permutation(rows))
    return [order[: rows // 2].sort().values, order[rows // 2 :].sort().values]


def in_bfloat16(weights: Sequence[Tensor]) -> list[Tensor]:
    """A copy."""
    return [weight.detach().to(torch.bfloat16, copy=True) for weight in weights]


def changed_share(before: Sequence[Tensor], weights: Sequence[Tensor]) -> float:
    """Of bfloat16 numbers and weights: which differ once they are rounded alike, bit by bit."""
    moved = [
        (one.view(torch.int16) != weight.detach().to(torch.bfloat16).view(torch.int16)).sum()
        for one, weight in zip(before, weights, strict=True)
    ]
    return float(torch.stack(moved).sum()) / sum(one.numel() for one in before)
