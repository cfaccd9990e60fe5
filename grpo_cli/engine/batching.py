"""How many rollouts are decoded at a time, and when a new one may enter: the three modes of Infinite Sampling
(arXiv 2506.22950). The scheduler decides the order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import parse_bytes, shown
from grpo_cli.support.ranges import Count

DEFAULT_SLOTS = 16


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

    def rows(self, budget: int) -> int:
        """How many rows of one prompt can run at a time if each holds only its first page."""
        return (budget - self.prompt_bytes) // self.page_bytes

    def slots(self, budget: int) -> int:
        """How many rows can run to full length at a time, with the prompts that they need."""
        with_prompts = budget // self.least
        if with_prompts < self.prompts:
            return with_prompts
        return (budget - self.prompts * self.prompt_bytes) // self.slot_bytes

    def probing(self, slots: int) -> int:
        """Bytes needed if all generate a prefix first, in `slots` slots that may be full."""
        beside = self.prompts * self.prompt_bytes + self.requests * self.parked_bytes
        return beside + slots * self.slot_bytes

    def probing_slots(self, budget: int) -> int:
        """How many slots fit that way."""
        return (budget - self.probing(0)) // self.slot_bytes


@dataclass(frozen=True)
class Room:
    """What a generation may allocate: at most `slots` rows at a time, and `budget` bytes of KV cache (None: no bound).

    `probes`: there are fewer slots than requests, and room for all prompts and every request's KV after its prefix.
    `probes_with`: the smallest kv_budget with that room if the given one is smaller, else 0.
    """

    slots: int
    budget: int | None
    probes: bool
    probes_with: int = 0


@dataclass(frozen=True, kw_only=True)
class Full:
    """All requests at once: as many slots as requests."""

    refills = False
    all_at_once = True
    slots = None
    kv_budget = None

    def fit(self, shape: KvShape, most: int | None = None) -> Room:
        """What to allocate for requests of this shape, never more than `most` slots."""
        return _unbounded(shape.requests, shape, most)

    def with_slots(self, slots: int) -> Infinite:
        """The closest sampler with a fixed number of slots."""
        return Infinite(slots=slots, kv_budget=None)


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """A fixed number of slots: as given, as many as fit into `kv_budget` (the fewer if both are given), or 16.

    `kv_budget` bounds the bytes of KV cache at any moment: slots, prompts and paused rollouts. Temporary tensors (a
    prefill's output, the copies of an eviction) and notes of eviction policies (`engine/eviction_note_bytes`) are
    extra.
    """

    slots: Count | None
    kv_budget: str | int | None

    all_at_once: ClassVar[bool] = False
    refills: ClassVar[bool]

    def __post_init__(self) -> None:
        if self.kv_budget is not None:
            parse_bytes(shown(self.kv_budget))

    def fit(self, shape: KvShape, most: int | None = None) -> Room:
        """What to allocate: never more slots than requests, `most`, or the budget's pages.

        Generating all prefixes first, to order the rest, costs slots. No order is twice as fast as another (Graham), so
        it may cost at most half of them; otherwise there is no prefix round.
        """
        if self.kv_budget is None:
            return _unbounded(self.slots or DEFAULT_SLOTS, shape, most)
        budget = parse_bytes(self.kv_budget)
        if budget < shape.least:
            raise UserError(
                f"sampler.kv_budget={self.kv_budget} ({budget} bytes) holds not even one sequence; the least that "
                f"would do is {shape.least} bytes ({shape.slot_bytes} for its tokens, {shape.prompt_bytes} for its "
                "prompt): raise it, or lower sampling.max_new_tokens or leave out the longest prompts"
            )
        limit = _least(shape.requests, self.slots, most)
        rows, full = min(limit, shape.rows(budget)), min(limit, shape.slots(budget))
        if not shape.parked_bytes or full == shape.requests:
            return Room(rows, budget, probes=False)
        probing = min(limit, shape.probing_slots(budget))
        if 2 * probing >= full:
            return Room(rows, budget, probes=True)
        enough = (shape.probing(n) for n in range(1, limit + 1) if min(limit, shape.slots(shape.probing(n))) <= 2 * n)
        return Room(rows, budget, probes=False, probes_with=next(enough))

    def with_slots(self, slots: int) -> _Slots:
        """The same sampler with that many slots."""
        return replace(self, slots=slots)


def _least(*limits: int | None) -> int:
    return min(limit for limit in limits if limit is not None)


def _unbounded(slots: int, shape: KvShape, most: int | None) -> Room:
    """At most that many slots, and no bound on bytes."""
    slots = _least(slots, shape.requests, most)
    return Room(slots, None, probes=shape.parked_bytes > 0 and slots < shape.requests)


@dataclass(frozen=True, kw_only=True)
class Micro(_Slots):
    """Micro sampling groups (section 3.1): rounds of at most `slots` requests, each decoded to its end."""

    refills = False


@dataclass(frozen=True, kw_only=True)
class Infinite(_Slots):
    """Continuous sampling: a free slot is refilled in the same step, across prompts too.

    The paper's fixed-slot variant (its definition is not public in detail). With `kv_budget` as many rows run as there
    is memory for.
    """

    refills = True


@runtime_checkable
class Sampler(Protocol):
    """Any of the three."""

    @property
    def refills(self) -> bool:
        """Whether a free slot goes to the next request at once."""

    @property
    def all_at_once(self) -> bool:
        """Whether no request ever waits for a slot."""

    @property
    def slots(self) -> int | None:
        """The number of slots; None: as many as requests, or as there is room for."""

    @property
    def kv_budget(self) -> str | int | None:
        """Most bytes of KV cache; None: no limit."""

    def fit(self, shape: KvShape, most: int | None = None) -> Room: ...

    def with_slots(self, slots: int) -> Sampler:
        """The same sampler with that many slots."""


# So few rollouts are no load for a GPU: an evaluation may run as many even if a step has fewer.
LEAST_AT_ONCE = 128


class Capped:
    """A sampler. `sampler=full` runs the `rollouts` of a step at once (None: there are no steps). An evaluation, which
    may have many more, runs that many at a time and refills."""

    def __init__(self, sampler: Sampler, rollouts: int | None = None) -> None:
        self._sampler = sampler
        self._at_once = max(rollouts or 0, LEAST_AT_ONCE) if sampler.all_at_once else None

    @property
    def refills(self) -> bool:
        return self._sampler.refills or self._sampler.all_at_once

    def fit(self, shape: KvShape) -> Room:
        """What to allocate, as the sampler's own `fit`."""
        return self._sampler.fit(shape, _least(shape.requests, self._at_once))
