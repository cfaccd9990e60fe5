"""SnapKV: the latest keys and those that the latest queries attend to (arXiv 2404.14469), in its form for decoding.

    score = maxpool_kernel(mean over the window's queries of softmax(max over the group of q K^T / sqrt(d)))

Measured: docs/studies.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.eviction import Budget, Candidates
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import Count


@dataclass(frozen=True)
class SnapKv(Budget):
    """SnapKV as R-KV and Sparse-RL use it for decoding. (The original compresses the prompt, once, with softmax over
    all keys, a sum over the window and one choice per query head.)"""

    kernel: Count

    needs_queries = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise UserError(f"sparsity.kernel={self.kernel} must be odd, so that a key is in the middle of it")

    def score(self, candidates: Candidates) -> Float[Tensor, "L R H S"]:
        """Compute the softmax over the keys older than the window of the largest logit of a group of queries; mean over
        the window, and the largest of `kernel` neighbours."""
        queries = candidates.queries
        assert queries is not None, "the last queries were noted"
        group, window = queries.shape[3:5]
        old = candidates.keys[..., : -candidates.window, :]
        logits = (queries.flatten(3, 4) @ old.mT).unflatten(3, (group, window)).amax(3) * candidates.scale
        weights = logits.softmax(-1, dtype=torch.float32).mean(-2)
        pooled = F.max_pool1d(weights.flatten(0, 1), self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.view(weights.shape)
