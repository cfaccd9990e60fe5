"""Eviction of keys and values from a sequence: none, or those beyond a budget.

A policy is a subclass of `Budget` with a `score` of each key's worth. The rest is common to all (`evictor.py`):
what they need of past steps is recorded, and full sequences are cut down. Keys are stored after rotation, at their
true positions, and are not rotated again.

full: budget + buffer keys     k k k k k k k k k k k k w w w   from oldest to newest; w: the window, always kept
chosen by score: budget keys   k . k k . . k . k . . . w w w
kept                           k k k k k w w w                 order kept; blocks behind are freed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from grpo_cli.interfaces import facts
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import Count


@dataclass(frozen=True)
class Candidates:
    """The keys that an eviction chooses from, in order of position, for L layers, R rows and H heads.

    `queries` are those of the last `window` steps, G per key-value head, in any order (all of them see every older
    key); `received` is the attention that each key has received so far. Each is None unless the policy needs it.
    """

    keys: Float[Tensor, "L R H T D"]
    window: int
    scale: float  # of a query's product with a key
    queries: Float[Tensor, "L R H G W D"] | None = None
    received: Float[Tensor, "L R H T"] | None = None


@dataclass(frozen=True)
class Dense:
    """Every key is kept until the rollout ends."""

    needs_received: ClassVar[bool] = False

    def capacity(self, max_new_tokens: int, longest: int) -> int:
        """Return keys a slot must have room for, if the longest prompt and response together have `longest` tokens.

        The last token is never fed back, so it needs no key.
        """
        return max(1, max_new_tokens - 1)


@facts(evicts=True)
@dataclass(frozen=True)
class Budget(ABC):
    """An eviction policy that keeps at most `budget` keys, and `buffer` more between two evictions, for each rollout,
    layer and key-value head (conf/sparsity/_budget.yaml). Keys keep the positions that they were rotated to, so budget
    >= length is the dense run bit for bit.
    """

    budget: Count
    buffer: Count
    window: Count
    sinks: Annotated[int, Field(ge=0)]
    protect_prompt: bool
    per_head: bool

    needs_queries: ClassVar[bool] = False
    needs_received: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.budget < self.window + self.sinks:
            raise UserError(
                f"sparsity.budget={self.budget} is less than sparsity.window={self.window} plus "
                f"sparsity.sinks={self.sinks}, which always stay: it must be at least {self.window + self.sinks}"
            )

    @abstractmethod
    def score(self, candidates: Candidates) -> Float[Tensor, "L R H S"]:
        """Return the worth of each candidate outside the window; the highest stay."""

    def choose(self, candidates: Candidates, sinks: Int[Tensor, "R"]) -> Int[Tensor, "L R H B"]:
        """Return the indices of those that stay, ascending. Of equal scores, the older key stays."""
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
        """Return it as `Dense.capacity`; if nothing can be evicted, no more than dense rollouts need."""
        dense = Dense().capacity(max_new_tokens, longest)
        room = self.budget + self.buffer
        if self.protect_prompt:
            return min(dense, room)
        never = longest - 1 <= room or max_new_tokens - 1 <= self.window
        return dense if never else room
