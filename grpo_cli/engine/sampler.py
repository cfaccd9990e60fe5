"""How many rollouts are decoded at a time, and when a new one may enter: the three ways of Infinite Sampling
(arXiv 2506.22950). The order in which they enter is the scheduler's business."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from grpo_cli.errors import UserError

DEFAULT_SLOTS = 16

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str | int, key: str = "sampler.kv_budget") -> int:
    """`512MiB`, `1.5GB` or a plain number of bytes; `key` is who says so."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise UserError(f"{key}={text} is no size; write a number of bytes or for example 512MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


@dataclass(frozen=True)
class KvShape:
    """What a generation would hold, in bytes: all its prompts (each once), and each slot."""

    prompt_bytes: int
    slot_bytes: int


ON_OOM = ("fail", "halve")


@dataclass(frozen=True)
class _Fit:
    """What all samplers share: `on_oom` says what to do when the device has no room for the slots that were wanted."""

    on_oom: str = field(default="fail", kw_only=True)

    def __post_init__(self) -> None:
        if self.on_oom not in ON_OOM:
            raise UserError(f"sampler.on_oom={self.on_oom} must be one of {', '.join(ON_OOM)}")


@dataclass(frozen=True)
class Full(_Fit):
    """All requests at once: as many slots as requests."""

    refills = False

    def fit(self, requests: int, shape: KvShape) -> int:
        """How many slots to allocate for so many requests of this shape."""
        return requests


@dataclass(frozen=True)
class _Slots(_Fit):
    """A fixed number of slots: as given, as many as fit a number of bytes (the fewer if both are given), or 16."""

    slots: int | None = None
    kv_budget: str | int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots is not None and self.slots < 1:
            raise UserError(f"sampler.slots={self.slots} must be at least 1")
        if self.kv_budget is not None:
            parse_bytes(self.kv_budget)

    def fit(self, requests: int, shape: KvShape) -> int:
        """How many slots to allocate: never more than there are requests, never more than the budget holds."""
        limits = [requests]
        if self.slots is not None or self.kv_budget is None:
            limits.append(self.slots or DEFAULT_SLOTS)
        if self.kv_budget is not None:
            budget = parse_bytes(self.kv_budget)
            room = (budget - shape.prompt_bytes) // shape.slot_bytes
            if room < 1:
                raise UserError(
                    f"sampler.kv_budget={self.kv_budget} ({budget} bytes) holds not even one sequence; the least that "
                    f"would do is {shape.prompt_bytes + shape.slot_bytes} bytes (prompts {shape.prompt_bytes}, one "
                    f"slot {shape.slot_bytes}): raise it, or lower sampling.max_new_tokens or train.prompts"
                )
            limits.append(room)
        return min(limits)


@dataclass(frozen=True)
class Micro(_Slots):
    """Micro sampling groups (section 3.1): rounds of at most `slots` requests, each round decoded to its end."""

    refills = False


@dataclass(frozen=True)
class Infinite(_Slots):
    """Continuous sampling: a slot that falls free is refilled in the same step, across prompts too.

    The paper's fixed-slot variant (its definition is not public in detail): each slot owns a region of keys and values
    that the next request overwrites, so memory is constant and no request is ever preempted.
    """

    refills = True


@runtime_checkable
class Sampler(Protocol):
    """Any of the three."""

    @property
    def refills(self) -> bool: ...
    @property
    def on_oom(self) -> str: ...

    def fit(self, requests: int, shape: KvShape) -> int: ...


class Capped:
    """A sampler and the most slots that have turned out to fit. `last` is what it answered last, 0 before."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._most: int | None = None
        self.last = 0

    @property
    def refills(self) -> bool:
        return self._sampler.refills

    @property
    def halves(self) -> bool:
        """Whether there is anything left to halve, and it may be."""
        return self._sampler.on_oom == "halve" and self.last > 1

    def halve(self) -> int:
        """From now on at most half the slots of the last answer."""
        self._most = self.last // 2
        return self._most

    def fit(self, requests: int, shape: KvShape) -> int:
        """How many slots to allocate, as the sampler's own `fit`."""
        wanted = self._sampler.fit(requests, shape)
        self.last = wanted if self._most is None else min(wanted, self._most)
        return self.last
