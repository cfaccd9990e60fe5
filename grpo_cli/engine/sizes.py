"""What a generation allocates, worked out beforehand from its requests, the model and the parts that bound it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.eviction import Budget, Dense
from grpo_cli.engine.keeper import SlotShape
from grpo_cli.engine.padding import round_up
from grpo_cli.engine.sampler import Capped, KvShape, Room, Sampler
from grpo_cli.types import Request


@dataclass(frozen=True)
class Sizes:
    """`slots` in keys, `kv` in bytes, and of what `kv` asks for, what there is `room` for.

    With `prefix`, everyone is to make so many tokens before the rest is ordered, and waits with the keys of those:
    `room.probes` says whether it comes to that.
    """

    max_new_tokens: int  # most of any request
    dense_capacity: int  # keys that a slot would have to hold without eviction
    prefix: int
    kv: KvShape
    room: Room
    slots: SlotShape

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        sampler: Sampler | Capped,
        sparsity: Dense | Budget,
        requests: Sequence[Request],
        prefix: int,
    ) -> Sizes:
        padding, layout = decoder.padding, decoder.layout()
        prompts = {request.prompt.id: len(request.prompt.token_ids) for request in requests}
        longest_prompt = max(prompts.values())
        new = max(request.sampling.max_new_tokens for request in requests)
        both = max(prompts[request.prompt.id] + request.sampling.max_new_tokens for request in requests)
        capacity = round_up(sparsity.capacity(new, both), padding.slot_tile)
        prompt_width = round_up(longest_prompt, padding.prompt_tile)
        # One token more is drawn than is fed; the latest key is written with the token that follows it.
        parked = sparsity.capacity(prefix + 1, longest_prompt + prefix + 1) if prefix else 0
        in_tokens = (prompt_width, capacity, parked)
        kv = KvShape(len(requests), len(prompts), *(layout.bytes_per_token * tokens for tokens in in_tokens))
        room = sampler.fit(kv)
        shape = (layout, room.slots, capacity, prompt_width, decoder.group, decoder.scale, decoder.device)
        dense = round_up(Dense().capacity(new, both), padding.slot_tile)
        return cls(new, dense, prefix, kv, room, SlotShape(*shape))

    @property
    def entries(self) -> int:
        """Prompts that are held from the start: all after a prefix of everybody's. Else as many as slots, and no slot
        need ever stay empty: an entry that nobody runs for has somebody who waits."""
        return self.kv.prompts if self.room.probes else min(self.kv.prompts, self.room.slots)

    @property
    def most_entries(self) -> int:
        """What they may grow to."""
        return self.entries if self.room.bounded else self.kv.prompts

    @property
    def dense_bytes(self) -> int:
        """What as many slots would take without eviction."""
        return self.slots.layout.bytes_per_token * self.room.slots * self.dense_capacity
