"""Which KV entries a slot holds, and so how many it must have room for: all of them, or as many as a budget allows.

A policy is a subclass of `Budget` with a `score`: how good a reason each key has to stay. The rest is the same for all,
and `keeper.py` acts on it. Keys lie after rotation, at their true positions, and nobody turns them again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.support.errors import UserError

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


@runtime_checkable
class Observer(Protocol):
    """Told of every eviction. For tests and studies."""

    def evicted(self, requests: Sequence[int], prompt: int, kept: Int[Tensor, "L R H B"]) -> None:
        """`kept` counts over the candidates: `prompt` keys of the prompt, and then the response keys that were held."""


@dataclass(frozen=True)
class Dense:
    """Every key is kept until the rollout ends."""

    def capacity(self, max_new_tokens: int, longest: int) -> int:
        """Keys a slot must have room for, if the longest prompt and response together have `longest` tokens.

        The last token is never fed back, so it needs no key.
        """
        return max(1, max_new_tokens - 1)


@dataclass(frozen=True)
class Budget(ABC):
    """At most `budget` keys, and `buffer` more between two evictions, for each rollout, layer and key-value head.

    budget          keys that are left after an eviction: the `window` latest, the sinks, and the best by score.
    buffer          steps between two evictions: they happen when budget + buffer keys are held, by each rollout's own
                    count. A slot has room for so many (rounded up to the tile of `cache.py`) and never for more.
    window          the latest keys, which are never evicted, and the latest steps whose queries `snapkv` and `rkv` ask.
    sinks           the first positions of the whole sequence, which are never evicted. A protected prompt covers them.
    protect_prompt  true: the prompt's keys stay, once for all its rollouts, and the budget is the response's. false (as
                    published): they count and can be evicted like any other. They are read where they lie, once for all
                    rollouts, until a rollout's first eviction moves those it keeps into its slot.
    per_head        whether each key-value head keeps keys of its own (R-KV), or all heads of a layer the same ones, by
                    the sum of their scores (Sparse-RL's release, which also lets layer 0 choose for all; here each
                    layer always chooses for itself).

    Keys keep the positions that they were rotated to, so budget >= length is the dense run bit for bit.
    """

    budget: int
    buffer: int
    window: int
    sinks: int
    protect_prompt: bool
    per_head: bool

    needs_queries: ClassVar[bool] = False
    needs_received: ClassVar[bool] = False
    observer: ClassVar[Observer | None] = None

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise UserError("\n".join(problems))

    def _problems(self) -> list[str]:
        least = {"budget": 1, "buffer": 1, "window": 1, "sinks": 0}
        problems = [
            f"sparsity.{name}={getattr(self, name)} must be a whole number of at least {low}"
            for name, low in least.items()
            if type(getattr(self, name)) is not int or getattr(self, name) < low
        ]
        problems += [
            f"sparsity.{name}={getattr(self, name)} must be true or false"
            for name in ("protect_prompt", "per_head")
            if type(getattr(self, name)) is not bool
        ]
        if not problems and self.budget < self.window + self.sinks:
            problems.append(
                f"sparsity.budget={self.budget} holds less than sparsity.window={self.window} and "
                f"sparsity.sinks={self.sinks}, which always stay: the least is {self.window + self.sinks}"
            )
        return problems

    @abstractmethod
    def score(self, candidates: Candidates) -> Float[Tensor, "L R H S"]:
        """How good a reason each candidate outside the window has to stay."""

    def choose(self, candidates: Candidates, sinks: Int[Tensor, "R"]) -> Int[Tensor, "L R H B"]:
        """The places of those that stay, ascending. Of equal scores, the older key stays."""
        scores = self.score(candidates)
        if not self.per_head:
            scores = scores.sum(2, keepdim=True)
        if self.sinks:
            first = torch.arange(scores.shape[-1], device=scores.device) < sinks[:, None]
            scores = scores.masked_fill(first[:, None], torch.inf)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.budget - self.window]
        best = best.sort(dim=-1).values
        layers, rows, heads, count = candidates.keys.shape[:4]
        latest = torch.arange(count - self.window, count, device=best.device)
        kept = torch.cat([best, latest.expand(*best.shape[:-1], -1)], dim=-1)
        return kept.expand(layers, rows, heads, -1)

    def capacity(self, max_new_tokens: int, longest: int) -> int:
        """As `Dense.capacity`; where nothing can be evicted, no more than dense rollouts need."""
        dense = Dense().capacity(max_new_tokens, longest)
        room = self.budget + self.buffer
        if self.protect_prompt:
            return min(dense, room)
        never = longest - 1 <= room or max_new_tokens - 1 <= self.window
        return dense if never else room


def watches(sparsity: Dense | Budget) -> bool:
    """Whether it has to see what every step attends to."""
    return isinstance(sparsity, Budget) and sparsity.needs_received


@dataclass(frozen=True)
class Streaming(Budget):
    """The younger the better: with sinks this is StreamingLLM (Xiao et al., arXiv 2309.17453), `sinks` and the latest.

    The original moves the kept keys to the positions 0, 1, 2, ... at every step; ours keep their own, as in R-KV's and
    Sparse-RL's versions of it, so that nothing changes as long as nothing is evicted.
    """

    def score(self, candidates: Candidates) -> Float[Tensor, "L R H S"]:
        layers, rows, heads, count, _ = candidates.keys.shape
        age = torch.arange(count - candidates.window, device=candidates.keys.device, dtype=torch.float32)
        return age.expand(layers, rows, heads, -1)


@dataclass(frozen=True)
class H2o(Budget):
    """Attention received so far: the heavy hitters (Zhang et al., arXiv 2306.14048; h2o_hf, absolute sizes).

    A sum over steps and not a mean, as there, which favours old keys; for grouped queries the mean over the group,
    where the original has one query per key. `window` is its `recent`, and `buffer: 1` evicts at every step as it does.
    (What R-KV and Sparse-RL call H2O looks at the last query alone.)
    """

    needs_received = True

    def score(self, candidates: Candidates) -> Float[Tensor, "L R H S"]:
        assert candidates.received is not None, "h2o needs the attention that keys received"
        return candidates.received[..., : -candidates.window]


@dataclass(frozen=True)
class _AttentionOfWindow(Budget):
    """Policies that ask what the last `window` queries attend to."""

    kernel: int

    needs_queries = True

    def _problems(self) -> list[str]:
        if type(self.kernel) is int and self.kernel >= 1 and self.kernel % 2:
            return super()._problems()
        return [*super()._problems(), f"sparsity.kernel={self.kernel} must be an odd number of at least 1"]

    def _attention(self, candidates: Candidates) -> Float[Tensor, "L R H S"]:
        """Softmax over the keys older than the window of the largest logit of a group of queries; mean over the window,
        and the largest of `kernel` neighbours."""
        queries = candidates.queries
        assert queries is not None, "the last queries were noted"
        group, window = queries.shape[3:5]
        old = candidates.keys[..., : -candidates.window, :]
        logits = (queries.flatten(3, 4) @ old.mT).unflatten(3, (group, window)).amax(3) * candidates.scale
        weights = logits.softmax(-1, dtype=torch.float32).mean(-2)
        pooled = F.max_pool1d(weights.flatten(0, 1), self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.view(weights.shape)


@dataclass(frozen=True)
class SnapKv(_AttentionOfWindow):
    """Attention from the last `window` queries, smoothed: SnapKV (Li et al., arXiv 2404.14469) as used in decoding.

    That form is R-KV's baseline and Sparse-RL's. (The original compresses the prompt, once, with softmax over all keys,
    a sum over the window and one choice per query head.)
    """

    def score(self, candidates: Candidates) -> Float[Tensor, "L R H S"]:
        return self._attention(candidates)


@dataclass(frozen=True)
class Rkv(_AttentionOfWindow):
    """Importance less redundancy: R-KV (Cai et al., arXiv 2505.24133; `r1_kv.py`, retain direction `last`).

    importance * attention (SnapKV's score) - (1 - importance) * redundancy; `importance` is the paper's lambda. The two
    are on one scale only roughly: a softmax of cosines is nearly flat, one of logits is not.
    """

    importance: float
    threshold: float

    def _problems(self) -> list[str]:
        problems = super()._problems()
        for name, low in (("importance", 0), ("threshold", -1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= 1:
                problems.append(f"sparsity.{name}={value} must be a number from {low} to 1")
        return problems

    def score(self, candidates: Candidates) -> Float[Tensor, "L R H S"]:
        keys = candidates.keys
        similar = redundancy(keys.flatten(0, 2), float(self.threshold)).view(keys.shape[:-1])
        similar = similar[..., : -candidates.window]
        return self.importance * self._attention(candidates) - (1 - self.importance) * similar


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
