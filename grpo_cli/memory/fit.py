"""`fit=<bytes>|auto` and `train.micro_batch_tokens=auto`: settings with which a run fits into memory, chosen by a plan.

Only settings that change no expectation, and none that was typed. The cheapest come first: fewer tokens in a pass and
fewer logits at a time cost next to nothing until passes become small, recomputing a layer costs a third of a pass, a
slot fewer costs decode steps. Nothing is chosen where there is room.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_cli.config.auto import AUTO
from grpo_cli.config.prepare import Prepared
from grpo_cli.memory.out_of_memory import NOTHING_FITS, breakdown
from grpo_cli.memory.plan import MemoryPlan
from grpo_cli.memory.planner import CHUNK, OFFLOAD, PARK, RECOMPUTE, SLOTS, TOKENS, Planner, Values, process_alone
from grpo_cli.settings import RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib, shown
from grpo_cli.support.memory import free_bytes, resident_bytes, total_bytes

# What updates may do, the cheapest first; the micro-batch is the largest with which each of them fits.
_FEWER_LOGITS, _RECOMPUTED, _OFFLOADED = {CHUNK: 128}, {RECOMPUTE: "full"}, {RECOMPUTE: "full", OFFLOAD: True}
_WAYS: tuple[Values, ...] = tuple(way | few for way in ({}, _RECOMPUTED, _OFFLOADED) for few in ({}, _FEWER_LOGITS))
SHARE = 0.9  # of free memory: plans are meant to be within a tenth of what a run takes
# A plan may take this share of the limit, and on a CPU leaves at least so many bytes, by which equal runs differ.
MARGIN, CPU_RESERVE = 0.95, 32 * 2**20
FEW_TOKENS = 1024  # a pass of fewer is slower than recomputing in a larger one
_COSTS = {
    TOKENS: "more and smaller passes",
    CHUNK: "next to nothing: logits in more and smaller parts",
    RECOMPUTE: "about a third of the time of updates",
    OFFLOAD: "copies between the GPU and the host in updates",
    PARK: "copies of the optimizer's state twice a step",
    SLOTS: "more decode steps",
}


@dataclass(frozen=True)
class Fitted:
    """The chosen settings, the plan with all of them, and the peak with none; every rollout at full length."""

    values: Values
    plan: MemoryPlan
    before: int

    def lines(self, name: str, room: int) -> Iterator[str]:
        """Format as a table."""
        yield f"{name}: at most {gib(self.plan.peak)} of {gib(room)} are expected to be held, in {self.plan.fullest}"
        if not self.values:
            yield "  nothing had to be chosen: all of it fits as it is"
            return
        yield f"  without these choices it would be {gib(self.before)}:"
        for key, value in self.values.items():
            yield f"  {f'{key}={shown(value)}':42}  costs {_COSTS[key]}"


def choose(run: Prepared[Any], typed: Set[str], say: Callable[[str], None]) -> tuple[str, ...]:
    """Choose for a run on its own device, report it, and return the choices as overrides. With `fit` these are of all
    settings that were not typed; without it, or with `resume`, the micro-batch alone, planned for the update."""
    planner = Planner.of(run, run.device)
    planner.plan()  # loads libraries, which the program then holds
    workspace = process_alone(run.device)
    planner = replace(planner, step=replace(planner.step, workspace=workspace))
    room, settings = room_of(run.settings, run.device, workspace, say), run.settings
    if settings.fit == "none" or settings.resume is not None:
        name, planner, may = f"{TOKENS}=auto", planner.without_rollouts, frozenset({TOKENS})
    else:
        name, may = f"fit={settings.fit}", choosable(planner, typed)
    fitted = cheapest_fit(planner, room, may, name)
    for line in fitted.lines(name, room):
        say(line)
    infinite = ("sampler=infinite",) if SLOTS in fitted.values and "slots" not in settings.parts["sampler"] else ()
    return (*infinite, *(f"{key}={shown(value)}" for key, value in fitted.values.items()))


def room_of(settings: RunSettings, device: torch.device, workspace: int, warn: Callable[[str], None]) -> int:
    """Return the bytes that the run may hold, the program's `workspace` among them. UserError for more than the machine
    has; if less is free than was typed, what is free."""
    held = resident_bytes() if device.type == "cpu" else workspace
    given, free, whole = settings.fit_bytes, free_bytes(device) + held, total_bytes(device)
    if given is None:
        return int(SHARE * (free - held)) + held
    if given > whole:
        raise UserError(
            f"fit={settings.fit}: the machine has {gib(whole)}; fit=auto takes what is free of it ({gib(free)})"
        )
    if given > free:
        warn(f"fit={settings.fit}: only {gib(free)} are free here, which is planned for; end what holds the rest")
    return within(min(given, free), device)


def within(given: int, device: torch.device) -> int:
    """Return the bytes of `given` that a plan may reach."""
    return max(0, min(int(MARGIN * given), given - (CPU_RESERVE if device.type == "cpu" else 0)))


def choosable(planner: Planner, typed: Set[str]) -> frozenset[str]:
    """Return the keys that may be chosen beside these typed ones."""
    may = {TOKENS, CHUNK, RECOMPUTE, SLOTS} | ({OFFLOAD, PARK} if planner.device.type == "cuda" else set())
    sampler = planner.step.sampler
    if sampler is None or "sampler.kv_budget" in typed or ("sampler" in typed and sampler.all_at_once):
        may.remove(SLOTS)
    if planner.step.chunk <= _FEWER_LOGITS[CHUNK]:
        may.remove(CHUNK)
    auto = planner.run.settings.train.micro_batch_tokens == AUTO
    return frozenset(may - typed | ({TOKENS} if auto else set()))


def cheapest_fit(planner: Planner, room: int, may: Set[str], name: str) -> Fitted:
    """Choose for `room` bytes among the keys that `may` be chosen. UserError with the least that would do if none
    suffices.

    First the cheapest way in which updates fit with passes that are not small, then the most tokens of a pass and the
    most slots, and last parking."""

    def fits(values: Values, of: Planner = planner) -> bool:
        return of.plan(values).peak <= room

    auto, updates = planner.run.settings.train.micro_batch_tokens == AUTO, planner.without_rollouts
    ways, small = [way for way in _WAYS if way.keys() <= may], {TOKENS: FEW_TOKENS} if TOKENS in may else {}
    way = next((way for way in ways if fits(way, updates) or fits({**way, **small}, updates)), ways[-1])
    for more in ({}, {PARK: True}) if PARK in may else ({},):
        values: dict[str, Any] = {**way, **more}
        for key, of in ((TOKENS, updates), (SLOTS, planner)):
            if key in may and ((auto and key == TOKENS) or not fits(values, of)):
                values[key] = max(1, most(of, key, room, values))
        if fits(values):
            break
    else:
        least = planner.plan({**ways[-1], **more, **dict.fromkeys(may & {TOKENS, SLOTS}, 1)})
        enough = math.ceil(max(least.peak / MARGIN, least.peak + CPU_RESERVE) / 2**20)
        table = "\n".join(breakdown(least, least.fullest))
        raise UserError(
            f"{name}: at most {gib(room)} may be held, and the least that would do with what is typed is "
            f"{gib(least.peak)}: give fit={enough}MiB, leave out typed settings, or take {NOTHING_FITS}\n{table}"
        )
    return Fitted(values, planner.plan(values), planner.plan().peak)


def most(planner: Planner, key: str, room: int, values: Values) -> int:
    """Return the largest micro-batch or number of slots with which a step fits; 0 if not even one does."""
    rollouts = planner.step.rollouts
    every = rollouts.rollouts if key == SLOTS else rollouts.tokens(planner.step.m, planner.step.shares_prompts)
    return largest(every, lambda number: planner.plan({**values, key: number}).peak <= room)


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, if each below it does too; 0 if not even 1 does.

    >>> largest(10, lambda number: number < 7), largest(10, lambda number: True), largest(10, lambda number: False)
    (6, 10, 0)
    """
    if fits(most):  # a single pass, which has no gradients of an earlier one, may fit where two smaller ones do not
        return most
    return bisect(range(1, most), False, key=lambda number: not fits(number))
