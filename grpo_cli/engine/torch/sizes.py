"""What a generation allocates, computed from its requests, the model and the sampler's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_cli.engine.batching import Capped, KvShape, Room, Sampler
from grpo_cli.engine.kv.cache import KvArena, Region
from grpo_cli.engine.kv.eviction import Budget, Dense
from grpo_cli.engine.kv.keeper import SlotShape
from grpo_cli.engine.kv.padding import round_up
from grpo_cli.engine.step.decoder import Decoder
from grpo_cli.types import Request

# While it grows, one block exists twice: with fewer blocks, more than a sixteenth of a budget could not be used.
FEW_BLOCKS = 16


@dataclass(frozen=True)
class Sizes:
    """`slots` in keys, `kv` in bytes, and the `room` that there is for what `kv` asks for.

    With `prefix`, every rollout should make so many tokens before the rest is ordered, and wait with their keys:
    `room.probes` says whether there is room for that.
    """

    max_new_tokens: int  # most of any request
    dense_capacity: int  # keys that a slot would have to hold without eviction
    prefix: int
    kv: KvShape
    room: Room
    slots: SlotShape
    row_page: int  # tokens
    prompt_page: int

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        sampler: Sampler | Capped,
        sparsity: Dense | Budget,
        requests: Sequence[Request],
        prefix: int,
        one_page: bool,
    ) -> Sizes:
        """`one_page`: each slot is a single page, as it always is with eviction."""
        padding, layout = decoder.padding, decoder.layout()
        prompts = {request.prompt.id: len(request.prompt.token_ids) for request in requests}
        longest_prompt = max(prompts.values())
        new = max(request.sampling.max_new_tokens for request in requests)
        both = max(prompts[request.prompt.id] + request.sampling.max_new_tokens for request in requests)
        keys = sparsity.capacity(new, both)
        one_page = one_page or isinstance(sparsity, Budget)
        row_page = round_up(keys, padding.slot_tile) if one_page else layout.page(padding.slot_tile, keys)
        prompt_page = layout.page(padding.prompt_tile, longest_prompt)
        capacity, prompt_width = round_up(keys, row_page), round_up(longest_prompt, prompt_page)
        # One more token is drawn than is fed; a token's key is written in the next step.
        parked = sparsity.capacity(prefix + 1, longest_prompt + prefix + 1) if prefix else 0
        in_tokens = (prompt_width, row_page, capacity, parked)
        kv = KvShape(len(requests), len(prompts), *(layout.bytes_per_token * tokens for tokens in in_tokens))
        room = sampler.fit(kv)
        shape = (layout, room.slots, capacity, prompt_width, decoder.group, decoder.scale, decoder.device)
        dense = round_up(Dense().capacity(new, both), padding.slot_tile)
        return cls(new, dense, prefix, kv, room, SlotShape(*shape), row_page, prompt_page)

    @property
    def rows_grow(self) -> bool:
        """Whether a row takes further pages as it grows. With a single page, as under eviction, a row that has entered
        has room to the end."""
        return self.row_page < self.slots.capacity

    def arena(self, fixed: bool) -> KvArena:
        """An empty arena for keys and values; with `fixed` everything is allocated at once, with a page for every
        slot."""
        shape, bytes_per_token = self.slots, self.slots.layout.bytes_per_token
        rows = Region(shape.slots, shape.capacity // self.row_page, self.row_page)
        prompts = Region(self.kv.prompts, shape.prompt_width // self.prompt_page, self.prompt_page)
        kv = KvArena(shape.layout, rows, prompts, self.kv.most // bytes_per_token, self.room.budget, shape.device)
        kv.set_aside = self.kv.requests * self.kv.parked_bytes if self.room.probes else 0
        if fixed:
            for slot in range(shape.slots):
                rows.take(slot, 1)
            prompts.fix(prompts.pages.size)
            kv.reserve(kv.wanted(0, 0))
        elif self.room.budget is not None and (self.room.budget < 2 * self.kv.least or len(kv.blocks) < FEW_BLOCKS):
            kv.reserve(kv.most_tokens)  # by growing it could not use all of the budget
        return kv

    @property
    def fixed_bytes(self) -> int:
        """Bytes of keys and values if each slot and each prompt has a fixed page."""
        shape = self.slots
        return shape.layout.bytes_per_token * (shape.slots * shape.capacity + self.kv.prompts * shape.prompt_width)

    @property
    def dense_bytes(self) -> int:
        """Bytes of as many slots without eviction, each at its longest."""
        return self.slots.layout.bytes_per_token * self.slots.slots * self.dense_capacity
