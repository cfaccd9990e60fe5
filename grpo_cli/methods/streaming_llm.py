"""StreamingLLM: the first positions and the latest keys (arXiv 2309.17453).

    kept = the first `sinks` positions and the latest budget - sinks keys;  score_j = j

Measured: docs/studies.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.eviction import Budget, Candidates


@dataclass(frozen=True)
class Streaming(Budget):
    """The younger the better. The original moves the kept keys to the positions 0, 1, 2, ... at every step; ours keep
    their own, as in R-KV's and Sparse-RL's versions of it, so that nothing changes as long as nothing is evicted.
    """

    def score(self, candidates: Candidates) -> Float[Tensor, "L R H S"]:
        layers, rows, heads, count, _ = candidates.keys.shape
        age = torch.arange(count - candidates.window, device=candidates.keys.device, dtype=torch.float32)
        return age.expand(layers, rows, heads, -1)
