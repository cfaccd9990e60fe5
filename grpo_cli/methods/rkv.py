"""R-KV: as SnapKV, less what resembles other keys (arXiv 2505.24133).

    score = importance * attention - (1 - importance) * redundancy

Measured: docs/studies.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_cli.engine.eviction import Candidates
from grpo_cli.methods.snapkv import SnapKv
from grpo_cli.support.ranges import Share

# Most entries of the similarity matrices that exist at one time; on a CPU few enough to stay in its caches (4x faster).
SIMILARITIES_AT_ONCE = {"cpu": 2**18, "cuda": 2**26}


@dataclass(frozen=True)
class Rkv(SnapKv):
    """A policy as in Cai et al.'s `r1_kv.py`, retain direction `last`: attention is SnapKV's score, `importance` the
    paper's lambda. The two are on one scale only roughly: a softmax of cosines is nearly flat, one of logits is not."""

    importance: Share
    threshold: Annotated[float, Field(ge=-1, le=1)]

    def score(self, candidates: Candidates) -> Float[Tensor, "L R H S"]:
        keys = candidates.keys
        similar = redundancy(keys.flatten(0, 2), float(self.threshold)).view(keys.shape[:-1])
        similar = similar[..., : -candidates.window]
        return self.importance * super().score(candidates) - (1 - self.importance) * similar


def redundancy(keys: Float[Tensor, "N T D"], threshold: float) -> Float[Tensor, "N T"]:
    """Return how much the other keys of a head resemble each one: softmax over keys of the mean cosine.

    For each key, the last other key that resembles it by more than `threshold` is let off (as the release does it: key
    0 if there is none), so that of many copies the newest counts as needed. Of exactly two, each lets off the other.
    """
    count = keys.shape[1]
    at_once = max(1, SIMILARITIES_AT_ONCE[keys.device.type] // count**2)
    return torch.cat([_redundancy(some, threshold) for some in keys.split(at_once)])


def _redundancy(keys: Float[Tensor, "N T D"], threshold: float) -> Float[Tensor, "N T"]:
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    similar = unit @ unit.mT
    similar.diagonal(dim1=-2, dim2=-1).zero_()
    # In float32, whose arithmetic is quicker than that of booleans and exact for places.
    place = torch.arange(keys.shape[1], device=keys.device, dtype=torch.float32)
    resembles = torch.gt(similar, threshold, out=torch.empty(similar.shape, device=keys.device))
    last = resembles.mul_(place).amax(-1, keepdim=True).long()
    similar.scatter_(-1, last, 0.0)
    return similar.mean(-2).softmax(-1, dtype=torch.float32)
