"""What a generation allocates, computed from its requests, the model and the sampler's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_cli.engine.batching import Capped, KvShape, Room, Sampler
from grpo_cli.engine.kv.cache import BLOCK, PagedCache, blocks_for
from grpo_cli.engine.kv.eviction import Budget, Dense
from grpo_cli.engine.kv.keeper import SlotShape
from grpo_cli.engine.step.decoder import Decoder
from grpo_cli.types import Request


@dataclass(frozen=True)
class Sizes:
    """`slots` in keys, `kv` in bytes, and the `room` that there is for what `kv` asks for. `blocks`: those of the
    cache, `spare_blocks` of which are for sequences that pause.

    With `prefix`, every rollout should make so many tokens before the rest is ordered, and wait with their keys:
    `room.probes` says whether there is room for that.
    """

    max_new_tokens: int  # most of any request
    dense_capacity: int  # keys that a sequence would have to hold without eviction
    capacity: int  # and those that it holds
    prefix: int
    kv: KvShape
    room: Room
    blocks: int
    spare_blocks: int
    slots: SlotShape

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        sampler: Sampler | Capped,
        sparsity: Dense | Budget,
        requests: Sequence[Request],
        prefix: int = 0,
        fills: bool = False,
        pauses: bool = False,
    ) -> Sizes:
        """`fills`: a slot more, for rows that fill up a shape. `pauses`: sequences wait for environments, as many as
        can run if memory has no bound."""
        layout = decoder.layout()
        prompts = {request.prompt.id: len(request.prompt.token_ids) for request in requests}
        longest = max(prompts.values())
        new = max(request.sampling.max_new_tokens for request in requests)
        both = max(prompts[request.prompt.id] + request.sampling.max_new_tokens for request in requests)
        keys = sparsity.capacity(new, both)
        # One more token is drawn than is fed; a token's key is written in the next step.
        parked = sparsity.capacity(prefix + 1, longest + prefix + 1) if prefix else 0
        first = keys if isinstance(sparsity, Budget) else 1
        in_bytes = (layout.block_bytes * blocks_for(tokens) for tokens in (longest, first, keys, parked))
        kv = KvShape(len(requests), len(prompts), *in_bytes)
        room = sampler.fit(kv)
        spare = kv.requests * kv.parked_bytes * room.probes + room.slots * kv.slot_bytes * pauses
        most = min(kv.most, kv.prompts * kv.prompt_bytes + room.slots * kv.slot_bytes + spare)
        if room.budget is not None:
            most, spare = min(most, room.budget), 0
        slots = room.slots + fills
        shape = SlotShape(
            layout, slots, BLOCK * blocks_for(keys), BLOCK * blocks_for(longest), decoder.scale, decoder.device
        )
        dense = BLOCK * blocks_for(Dense().capacity(new, both))
        return cls(new, dense, keys, prefix, kv, room, most // layout.block_bytes, spare // layout.block_bytes, shape)

    def cache(self, fills: bool) -> PagedCache:
        return PagedCache(self.slots.layout, self.blocks, self.slots.device, fills)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of all blocks, which a GPU allocates at once."""
        return self.blocks * self.slots.layout.block_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of as many sequences without eviction, each at its longest."""
        return self.slots.layout.bytes_per_token * self.room.slots * self.dense_capacity
