"""The blocks of keys and values of a generation, computed from its requests, the model and the sampler's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_cli.engine.eviction import Budget, Dense
from grpo_cli.engine.kv_cache import KvLayout, blocks_for
from grpo_cli.engine.samplers import LEAST_AT_ONCE, Sampler
from grpo_cli.types import Request


@dataclass(frozen=True)
class KvPlan:
    """The blocks of a generation. A sequence takes blocks as it grows, at most `own_blocks`. A prompt of at most
    `prompt_blocks` is stored once, from the start of its first rollout to the end of its last. With `prefix_blocks`
    every rollout makes a prefix first, for the predictor, and keeps `prefix_blocks` blocks until it continues. Prompts
    that wait are computed again if there are more than LEAST_AT_ONCE and than can run.
    """

    layout: KvLayout
    slots: int  # sequences that run at a time
    blocks: int  # of the pool
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
        budget = sampler.budget_for((prompt + own) * layout.block_bytes)
        bound = 0 if budget is None else budget // layout.block_bytes
        # One more token is drawn than is fed; a token's key is written in the next step.
        prefix_keys = sparsity.capacity(prefix + 1, max(lengths.values()) + prefix + 1)
        prefix_blocks = blocks_for(prefix_keys) if prefix and slots < count and not bound else 0
        # An evicting sequence soon holds what it may, and so does its slot.
        slots = min(slots, (bound - prompt) // (own if isinstance(sparsity, Budget) else 1)) if bound else slots
        spare = 0 if bound else count * prefix_blocks + slots * own * pauses
        held = count if prefix_blocks else max(slots * (1 + pauses), LEAST_AT_ONCE)
        blocks = min(all_at_once, bound or prompt * min(len(lengths), held) + slots * own + spare)
        return cls(layout, slots, blocks, own, prompt, prefix_blocks, spare)
