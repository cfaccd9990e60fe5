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


@dataclass(frozen=True)
class KvShape:
    """The KV cache that a number of requests need, in bytes.

    A row starts with one page and takes more as it grows, up to `slot_bytes`. A prompt is stored once, from the start
    of its first rollout to the end of its last. If every rollout generates a prefix first, for the predictor, it keeps
    that prefix's KV entries until it continues.
    """

    requests: int
    prompts: int  # different ones
    prompt_bytes: int  # of each, at most
    page_bytes: int
    slot_bytes: int
    parked_bytes: int = 0  # of each request that waits after its prefix; 0: no prefix

    @property
    def least(self) -> int:
        """Bytes of one sequence at its longest."""
        return self.prompt_bytes + self.slot_bytes

    @property
    def most(self) -> int:
        """Bytes of all sequences, each at its longest."""
        return self.prompts * self.prompt_bytes + self.requests * self.slot_bytes

    def slots(self, budget: int) -> int:
        """Return how many rows can run to full length at a time, with the prompts that they need."""
        with_prompts = budget // self.least
        if with_prompts < self.prompts:
            return with_prompts
        return (budget - self.prompts * self.prompt_bytes) // self.slot_bytes

    def probing(self, slots: int) -> int:
        """Return the bytes needed if all generate a prefix first, in `slots` slots that may be full."""
        beside = self.prompts * self.prompt_bytes + self.requests * self.parked_bytes
        return beside + slots * self.slot_bytes


@dataclass(frozen=True)
class Room:
    """The limits of a generation: at most `slots` rows at a time, and `budget` bytes of KV cache (None: no bound).

    `probes`: there are fewer slots than requests, and room for all prompts and every request's KV after its prefix.
    `probes_with`: the smallest kv_budget with that room if the given one is smaller, else 0.
    """

    slots: int
    budget: int | None
    probes: bool
    probes_with: int = 0


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A number of slots: as given, as many as fit into `kv_budget` (the fewer if both are given), or 16. With `refills`
    a free slot goes to the next request at once; if `all_at_once`, no request of a step waits for a slot.

    `kv_budget` bounds the bytes of KV cache at any moment: slots, prompts and paused rollouts. Temporary tensors (a
    prefill's output, the copies of an eviction) and statistics of eviction policies (`engine/eviction_note_bytes`) are
    extra.
    """

    refills: ClassVar[bool] = True
    all_at_once: ClassVar[bool] = False
    slots: Count | None
    kv_budget: Bytes | None

    def fit(self, shape: KvShape, per_step: int | None = None) -> Room:
        """Return what requests of this shape may allocate, never more slots than requests or pages of the budget;
        `per_step` rollouts are made in a step, if known.

        Generating all prefixes first, to order the rest, costs slots. No order is twice as fast as another (Graham), so
        it may cost at most half of them; otherwise there is no prefix round.
        """
        if self.kv_budget is None:
            slots = max(per_step or 0, LEAST_AT_ONCE) if self.all_at_once else self.slots or DEFAULT_SLOTS
            slots = min(slots, shape.requests)
            return Room(slots, None, probes=shape.parked_bytes > 0 and slots < shape.requests)
        budget = parse_bytes(self.kv_budget)
        if budget < shape.least:
            raise UserError(
                f"sampler.kv_budget={self.kv_budget} ({budget} bytes) holds not even one sequence; the least that "
                f"would do is {shape.least} bytes ({shape.slot_bytes} for its tokens, {shape.prompt_bytes} for its "
                "prompt): raise it, or lower sampling.max_new_tokens or leave out the longest prompts"
            )
        limit = min(shape.requests, self.slots or shape.requests)
        rows = min(limit, (budget - shape.prompt_bytes) // shape.page_bytes)
        full = min(limit, shape.slots(budget))
        if not shape.parked_bytes or full == shape.requests:
            return Room(rows, budget, probes=False)
        if 2 * min(limit, (budget - shape.probing(0)) // shape.slot_bytes) >= full:
            return Room(rows, budget, probes=True)
        enough = (shape.probing(n) for n in range(1, limit + 1) if min(limit, shape.slots(shape.probing(n))) <= 2 * n)
        return Room(rows, budget, probes=False, probes_with=next(enough))

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
    """Continuous sampling: a free slot is refilled in the same step, across prompts too.

    The paper's fixed-slot variant (its definition is not public in detail). With `kv_budget` as many rows run as there
    is memory for.
    """


@dataclass(frozen=True)
class KvPlan:
    """The allocations of a generation, computed from its requests, the model and the sampler's limits.

    Of `blocks`, `spare_blocks` are for sequences that pause. A sequence has at most `keys` of its own, and reads a
    prompt of at most `prompt_blocks`. `saved` is the share of bytes that eviction saves of as many sequences without
    it, each at its longest.
    """

    layout: KvLayout
    shape: KvShape
    room: Room
    blocks: int
    spare_blocks: int
    keys: int
    prompt_blocks: int
    saved: float

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
        """Compute a plan. With `prefix`, every rollout should make so many tokens before the rest is ordered, and wait
        with their keys. `pauses`: sequences wait for environments, as many as can run if memory has no bound."""
        prompts = {request.prompt.id: len(request.prompt.token_ids) for request in requests}
        longest = max(prompts.values())
        new = max(request.sampling.max_new_tokens for request in requests)
        both = max(prompts[request.prompt.id] + request.sampling.max_new_tokens for request in requests)
        keys = sparsity.capacity(new, both)
        # One more token is drawn than is fed; a token's key is written in the next step.
        parked = sparsity.capacity(prefix + 1, longest + prefix + 1) if prefix else 0
        first = keys if isinstance(sparsity, Budget) else 1
        in_bytes = (layout.block_bytes * blocks_for(tokens) for tokens in (longest, first, keys, parked))
        shape = KvShape(len(requests), len(prompts), *in_bytes)
        room = sampler.fit(shape, per_step)
        spare = shape.requests * shape.parked_bytes * room.probes + room.slots * shape.slot_bytes * pauses
        most = min(shape.most, shape.prompts * shape.prompt_bytes + room.slots * shape.slot_bytes + spare)
        if room.budget is not None:
            most, spare = min(most, room.budget), 0
        dense = layout.block_bytes * blocks_for(Dense().capacity(new, both))
        held, whole = (shape.prompts * shape.prompt_bytes + room.slots * row for row in (shape.slot_bytes, dense))
        blocks, spare_blocks = most // layout.block_bytes, spare // layout.block_bytes
        return cls(layout, shape, room, blocks, spare_blocks, keys, blocks_for(longest), 1 - held / whole)

    @property
    def own_blocks(self) -> int:
        return blocks_for(self.keys)
