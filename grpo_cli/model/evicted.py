"""Attention of padded rows in which keys were evicted: each token sees the keys before it that were left by then.

The slow way: scores of all pairs, one layer at a time. The backward pass makes them again, so that no layer's are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Evicted:
    """Of each position, layer and key-value head: from which position on its key is no longer seen."""

    until: Int[Tensor, "B T L H"]

    def attention(
        self,
        layer: int,
        query: Float[Tensor, "B HG T D"],
        key: Float[Tensor, "B H T D"],
        value: Float[Tensor, "B H T D"],
        scale: float,
    ) -> Float[Tensor, "B HG T D"]:
        given = query, key, value, self.until[:, :, layer].transpose(1, 2), scale
        found: Tensor = checkpoint(_attention, *given, use_reentrant=False, preserve_rng_state=False)
        return found


def _attention(query: Tensor, key: Tensor, value: Tensor, until: Int[Tensor, "B H T"], scale: float) -> Tensor:
    place = torch.arange(until.shape[-1], device=until.device)
    seen = (place <= place[:, None]) & (place[:, None] < until[:, :, None])
    key, value, seen = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value, seen))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
