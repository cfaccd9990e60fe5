"""How many rollouts are decoded at a time, and when a new one may enter: the three ways of Infinite Sampling
(arXiv 2506.22950). The order in which they enter is the scheduler's business."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Protocol, runtime_checkable

from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import parse_bytes, shown
from grpo_cli.support.ranges import Count, OneOf

DEFAULT_SLOTS = 16


@dataclass(frozen=True)
class KvShape:
    """What so many requests hold, in bytes of KV cache.

    A row begins with a page and takes more as it grows, up to `slot_bytes`. A prompt is held once, from its first
    rollout's start to its last one's end. Where all make a prefix first, so that it can be read, every rollout
    keeps its KV entries until it goes on.
    """

    requests: int
    prompts: int  # that the requests have between them
    prompt_bytes: int  # of each, at most
    page_bytes: int
    slot_bytes: int
    parked_bytes: int = 0  # of each request that waits after its prefix; 0: no prefix is made first

    @property
    def least(self) -> int:
        """What one sequence takes."""
        return self.prompt_bytes + self.slot_bytes

    @property
    def most(self) -> int:
        """What all take together, each at its longest."""
        return self.prompts * self.prompt_bytes + self.requests * self.slot_bytes

    def rows(self, budget: int) -> int:
        """The most rows that can run at a time, all of one prompt and each at its first page."""
        return (budget - self.prompt_bytes) // self.page_bytes

    def slots(self, budget: int) -> int:
        """The most rows that can run to their longest, with as many prompts as can run in them at a time."""
        with_prompts = budget // self.least
        if with_prompts < self.prompts:
            return with_prompts
        return (budget - self.prompts * self.prompt_bytes) // self.slot_bytes

    def probing(self, slots: int) -> int:
        """Bytes where all make a prefix first, in so many slots that may be full."""
        beside = self.prompts * self.prompt_bytes + self.requests * self.parked_bytes
        return beside + slots * self.slot_bytes

    def probing_slots(self, budget: int) -> int:
        """The most slots with which that fits."""
        return (budget - self.probing(0)) // self.slot_bytes


@dataclass(frozen=True)
class Room:
    """What a generation may allocate.

    `slots`: rows that may run at a time. `budget`: bytes of KV cache, a second bound (None: no bound).
    `probes`: there are slots for some only, and room for all prompts and for the KV of all requests after their prefix.
    `probes_with`: the least kv_budget that has this room where the one that was given has not, else 0.
    """

    slots: int
    budget: int | None
    probes: bool
    probes_with: int = 0


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """What all samplers share: `on_oom` says what to do when the device has no room for the slots that were wanted."""

    on_oom: Annotated[str, OneOf(("fail", "halve"))]


@dataclass(frozen=True, kw_only=True)
class Full(_Fit):
    """All requests at once: as many slots as requests."""

    refills = False
    all_at_once = True
    slots = None
    kv_budget = None

    def fit(self, shape: KvShape, most: int | None = None) -> Room:
        """What to allocate for requests of this shape, never more than `most` slots."""
        return _unbounded(shape.requests, shape, most)

    def with_slots(self, slots: int) -> Infinite:
        """The nearest to it that has so many slots."""
        return Infinite(slots=slots, kv_budget=None, on_oom=self.on_oom)


@dataclass(frozen=True, kw_only=True)
class _Slots(_Fit):
    """A fixed number of slots: as given, as many as fit a number of bytes (the fewer if both are given), or 16.

    `kv_budget` bounds the bytes of the KV cache of slots, prompts and rollouts that wait half-made, at any moment, and
    rows enter by what is free of it. What a step passes through (a prefill's own output, the copies of an eviction) and
    what eviction policies note (`engine/eviction_note_bytes`) lie beside it.
    """

    slots: Count | None
    kv_budget: str | int | None

    all_at_once: ClassVar[bool] = False
    refills: ClassVar[bool]

    def __post_init__(self) -> None:
        if self.kv_budget is not None:
            parse_bytes(shown(self.kv_budget))

    def fit(self, shape: KvShape, most: int | None = None) -> Room:
        """What to allocate: never more slots than requests, nor than `most`, nor than the budget has pages for.

        A prefix of everybody's, to order the rest by, costs slots. No order is twice as fast as another (Graham), so it
        may cost half of them and no more; what has room for less goes without.
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
        """The same with so many slots."""
        return replace(self, slots=slots)


def _least(*limits: int | None) -> int:
    return min(limit for limit in limits if limit is not None)


def _unbounded(slots: int, shape: KvShape, most: int | None) -> Room:
    """So many slots, or as few as are wanted or allowed, and whatever else it takes."""
    slots = _least(slots, shape.requests, most)
    return Room(slots, None, probes=shape.parked_bytes > 0 and slots < shape.requests)


@dataclass(frozen=True, kw_only=True)
class Micro(_Slots):
    """Micro sampling groups (section 3.1): rounds of at most `slots` requests, each round decoded to its end."""

    refills = False


@dataclass(frozen=True, kw_only=True)
class Infinite(_Slots):
    """Continuous sampling: a slot that falls free is refilled in the same step, across prompts too.

    The paper's fixed-slot variant (its definition is not public in detail). With `kv_budget` as many run as there is
    room for.
    """

    refills = True


@runtime_checkable
class Sampler(Protocol):
    """Any of the three."""

    @property
    def refills(self) -> bool:
        """Whether a slot that falls free is given to the next request at once."""

    @property
    def all_at_once(self) -> bool:
        """Whether no request ever waits for a slot."""

    @property
    def slots(self) -> int | None:
        """How many slots are asked for; None: as many as requests, or as there is room for."""

    @property
    def kv_budget(self) -> str | int | None:
        """Most bytes of KV cache; None: no limit."""

    @property
    def on_oom(self) -> str:
        """fail, or halve: what is left is served with half the slots."""

    def fit(self, shape: KvShape, most: int | None = None) -> Room: ...

    def with_slots(self, slots: int) -> Sampler:
        """One that has so many slots."""


# So many rollouts at a time are next to none for a GPU: an evaluation may take them whatever a step has.
LEAST_AT_ONCE = 128


class Capped:
    """A sampler and the most slots that have turned out to fit (`most`, None: nothing was ever too much).

    One that takes all at once takes the `rollouts` of a step so, which a person has chosen (None: there are no steps);
    of an evaluation, which may be of many more, as many at a time, the others as these end. `last` is what it answered
    last, 0 before.
    """

    def __init__(self, sampler: Sampler, rollouts: int | None = None) -> None:
        self._sampler = sampler
        self._at_once = max(rollouts or 0, LEAST_AT_ONCE) if sampler.all_at_once else None
        self.most: int | None = None
        self.last = 0

    @property
    def refills(self) -> bool:
        return self._sampler.refills or self._sampler.all_at_once

    @property
    def may_halve(self) -> bool:
        return self._sampler.on_oom == "halve"

    @property
    def halves(self) -> bool:
        """Whether there is anything left to halve, and it may be."""
        return self.may_halve and self.last > 1

    def halve(self) -> int:
        """From now on at most half the slots of the last answer."""
        self.most = self.last // 2
        return self.most

    def fit(self, shape: KvShape) -> Room:
        """What to allocate, as the sampler's own `fit`."""
        room = self._sampler.fit(shape, _least(shape.requests, self.most, self._at_once))
        self.last = room.slots
        return room
