"""H2O: the latest keys and those that received most attention so far (arXiv 2306.14048).

    score_j = sum over steps t >= j of (mean over the group's queries of softmax(q_t K^T / sqrt(d))_j)

Measured: docs/studies.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.eviction import Budget, Candidates


@dataclass(frozen=True)
class H2o(Budget):
    """Attention received so far, as in h2o_hf with absolute sizes: a sum over steps and not a mean, which favours old
    keys; for grouped queries the mean over the group, where the original has one query per key. `window` is its
    `recent`, and `buffer: 1` evicts at every step as it does. (What R-KV and Sparse-RL call H2O looks at the last query
    alone.)
    """

    needs_received = True

    def score(self, candidates: Candidates) -> Float[Tensor, "L R H S"]:
        assert candidates.received is not None, "h2o needs the attention that keys received"
        return candidates.received[..., : -candidates.window]
