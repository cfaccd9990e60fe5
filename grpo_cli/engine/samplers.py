"""The number of rollouts decoded at a time: the three modes of Infinite Sampling (arXiv 2506.22950). The scheduler
decides the order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import parse_bytes
from grpo_cli.support.ranges import Bytes, Count

DEFAULT_SLOTS = 16
# So few rollouts are no load for a GPU: an evaluation may run as many at once even if a step has fewer.
LEAST_AT_ONCE = 128


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A number of slots: as given, as many as fit into `kv_budget` (the fewer if both are given), or 16. With `refills`
    a free slot goes to the next request at once; if `all_at_once`, no request of a step waits for a slot. `kv_budget`
    bounds the cache at any moment; temporary tensors and statistics of eviction policies are extra.
    """

    refills: ClassVar[bool] = True
    all_at_once: ClassVar[bool] = False
    slots: Count | None
    kv_budget: Bytes | None

    def slots_for(self, requests: int, per_step: int | None) -> int:
        """Return how many requests may run at a time if memory allows it; `per_step` rollouts are made in a step."""
        if self.kv_budget is not None:
            return min(requests, self.slots or requests)
        slots = max(per_step or 0, LEAST_AT_ONCE) if self.all_at_once else self.slots or DEFAULT_SLOTS
        return min(requests, slots)

    def budget_for(self, least: int) -> int | None:
        """Return `kv_budget` in bytes. UserError if it is below `least`, which one sequence takes."""
        if self.kv_budget is None:
            return None
        budget = parse_bytes(self.kv_budget)
        if budget < least:
            raise UserError(
                f"sampler.kv_budget={self.kv_budget} ({budget} bytes) is too small for one sequence: set at least "
                f"{least} bytes, or lower sampling.max_new_tokens"
            )
        return budget

    def with_slots(self, slots: int) -> Sampler:
        """Return the closest sampler with that many slots."""
        return replace(self, slots=slots)


@dataclass(frozen=True, kw_only=True)
class Full(Sampler):
    """All requests of a step at once. An evaluation, which may have many more, runs that many at a time and refills."""

    all_at_once = True
    slots: None = field(default=None, init=False)
    kv_budget: None = field(default=None, init=False)

    def with_slots(self, slots: int) -> Infinite:
        return Infinite(slots=slots, kv_budget=None)


class Micro(Sampler):
    """Micro sampling groups (section 3.1): rounds of at most `slots` requests, each decoded to its end."""

    refills = False


class Infinite(Sampler):
    """Continuous sampling: a free slot is refilled in the same step, across prompts too."""
