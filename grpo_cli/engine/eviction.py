"""Scores of cached keys: which of them a slot can best do without. One function a policy; others decide who is kept.

A higher score is a better reason to stay. Keys lie after rotation, at their true positions, and nobody turns them
again. The last `window` candidates are never scored, as they always stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

# Most entries of the similarity matrices that exist at one time; on a CPU few enough to stay in its caches (4x faster).
SIMILARITIES_AT_ONCE = {"cpu": 2**18, "cuda": 2**26}


@dataclass(frozen=True)
class Candidates:
    """The keys that an eviction chooses from, in the order of their positions, for L layers, R rows and H heads.

    `queries` are those of the last `window` steps, G per key-value head, in any order (all of them see every older
    key); `received` is the attention that each key was paid so far. Each is None unless the policy needs it.
    """

    keys: Float[Tensor, "L R H T D"]
    window: int
    scale: float  # of a query's product with a key
    queries: Float[Tensor, "L R H G W D"] | None = None
    received: Float[Tensor, "L R H T"] | None = None


def streaming(candidates: Candidates) -> Float[Tensor, "L R H S"]:
    """The younger the better: with sinks this is StreamingLLM (Xiao et al., arXiv 2309.17453), `sinks` and the latest.

    The original moves the kept keys to the positions 0, 1, 2, ... at every step; ours keep their own, as in R-KV's and
    Sparse-RL's versions of it, so that nothing changes as long as nothing is evicted.
    """
    layers, rows, heads, count, _ = candidates.keys.shape
    age = torch.arange(count - candidates.window, device=candidates.keys.device, dtype=torch.float32)
    return age.expand(layers, rows, heads, -1)


def h2o(candidates: Candidates) -> Float[Tensor, "L R H S"]:
    """Attention received so far: the heavy hitters (Zhang et al., arXiv 2306.14048; h2o_hf, absolute sizes).

    A sum over steps and not a mean, as there, which favours the old; for grouped queries the mean over the group, where
    the original has one query per key. `window` is its `recent`, and `buffer: 1` evicts at every step as it does. (What
    R-KV and Sparse-RL call H2O looks at the last query alone.)
    """
    assert candidates.received is not None, "h2o needs the attention that keys received"
    return candidates.received[..., : -candidates.window]


def snapkv(candidates: Candidates, kernel: int) -> Float[Tensor, "L R H S"]:
    """Attention from the last `window` queries, smoothed: SnapKV (Li et al., arXiv 2404.14469) as used in decoding.

    That form is R-KV's baseline and Sparse-RL's: the largest logit of a group of queries, softmax over the keys older
    than the window, mean over the window, and the largest of `kernel` neighbours. (The original compresses the prompt,
    once, with softmax over all keys, a sum over the window and one choice per query head.)
    """
    queries = candidates.queries
    assert queries is not None, "snapkv needs the last queries"
    group, window = queries.shape[3:5]
    old = candidates.keys[..., : -candidates.window, :]
    logits = (queries.flatten(3, 4) @ old.mT).unflatten(3, (group, window)).amax(3) * candidates.scale
    weights = logits.softmax(-1, dtype=torch.float32).mean(-2)
    pooled = F.max_pool1d(weights.flatten(0, 1), kernel, stride=1, padding=kernel // 2)
    return pooled.view(weights.shape)


def rkv(candidates: Candidates, kernel: int, importance: float, threshold: float) -> Float[Tensor, "L R H S"]:
    """Importance less redundancy: R-KV (Cai et al., arXiv 2505.24133; `r1_kv.py`, retain direction `last`).

    importance * snapkv - (1 - importance) * redundancy; `importance` is the paper's lambda. The two are on one scale
    only roughly: a softmax of cosines is nearly flat, one of logits is not.
    """
    keys = candidates.keys
    similar = redundancy(keys.flatten(0, 2), threshold).view(keys.shape[:-1])[..., : -candidates.window]
    return importance * snapkv(candidates, kernel) - (1 - importance) * similar


def redundancy(keys: Float[Tensor, "N T D"], threshold: float) -> Float[Tensor, "N T"]:
    """How much the other keys of a head resemble each one: softmax over keys of the mean cosine.

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
