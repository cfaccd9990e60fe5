"""The number of rollouts decoded at a time: the three modes of Infinite Sampling (arXiv 2506.22950), and the keys and
values that they need. The scheduler decides the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from grpo_cli.engine.eviction import Budget, Dense
from grpo_cli.engine.kv_cache import KvLayout, blocks_for
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import parse_bytes
from grpo_cli.support.ranges import Bytes, Count
from grpo_cli.types import Request

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

    def budget_for(self, prompt: int, tokens: int) -> int | None:
        """Return `kv_budget` in bytes. UserError if it does not hold one sequence."""
        if self.kv_budget is None:
            return None
        budget = parse_bytes(self.kv_budget)
        if budget < prompt + tokens:
            raise UserError(
                f"sampler.kv_budget={self.kv_budget} ({budget} bytes) holds not even one sequence; the least that "
                f"would do is {prompt + tokens} bytes ({tokens} for its tokens, {prompt} for its prompt): raise it, or "
                "lower sampling.max_new_tokens or leave out the longest prompts"
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


@dataclass(frozen=True)
class KvPlan:
    """The blocks of a generation, computed from its requests, the model and the sampler's limits.

    A sequence takes blocks as it grows, at most `own_blocks`. A prompt of at most `prompt_blocks` is stored once, from
    the start of its first rollout to the end of its last. With `prefix_blocks` every rollout makes a prefix first, for
    the predictor, and keeps `prefix_blocks` blocks until it continues. Prompts that wait are computed again
    if there are more than LEAST_AT_ONCE and than can run.
    """

    layout: KvLayout
    slots: int  # sequences that run at a time
    blocks: int  # of the pool
    is_bounded: bool  # by sampler.kv_budget
    own_blocks: int
    prompt_blocks: int
    prefix_blocks: int
    spare_blocks: int  # for sequences that pause

    @classmethod
    def of(
        cls,
        layout: KvLayout,
        sampler: Sampler,
        sparsity: Dense | Budget,
        requests: Sequence[Request],
        per_step: int | None,
        prefix: int,
        pauses: bool,
    ) -> KvPlan:
        """Compute a plan. With `prefix`, every rollout makes its first `prefix` tokens before the rest is ordered, and
        keeps their keys while it waits, unless all run at a time or memory has a bound. `pauses`: sequences wait for
        environments, as many as can run; under a bound no blocks are reserved for them."""
        lengths = {request.prompt.id: len(request.prompt.token_ids) for request in requests}
        new = max(request.sampling.max_new_tokens for request in requests)
        both = max(lengths[request.prompt.id] + request.sampling.max_new_tokens for request in requests)
        own, prompt, count = blocks_for(sparsity.capacity(new, both)), blocks_for(max(lengths.values())), len(requests)
        slots, all_at_once = sampler.slots_for(count, per_step), prompt * len(lengths) + count * own
        budget = sampler.budget_for(prompt * layout.block_bytes, own * layout.block_bytes)
        bound = 0 if budget is None else budget // layout.block_bytes
        # One more token is drawn than is fed; a token's key is written in the next step.
        prefix_keys = sparsity.capacity(prefix + 1, max(lengths.values()) + prefix + 1)
        prefix_blocks = blocks_for(prefix_keys) if prefix and slots < count and not bound else 0
        # An evicting sequence soon holds what it may, and so does its slot.
        slots = min(slots, (bound - prompt) // (own if isinstance(sparsity, Budget) else 1)) if bound else slots
        spare = 0 if bound else count * prefix_blocks + slots * own * pauses
        held = count if prefix_blocks else max(slots * (1 + pauses), LEAST_AT_ONCE)
        blocks = min(all_at_once, bound or prompt * min(len(lengths), held) + slots * own + spare)
        return cls(layout, slots, blocks, bound > 0, own, prompt, prefix_blocks, spare)
