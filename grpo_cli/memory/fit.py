"""`fit=<bytes>|auto` and `train.micro_batch_tokens=auto`: settings with which a run fits into memory, chosen by a plan.

Only settings that change no expectation, and none that was typed. The cheapest come first: fewer tokens in a pass and
fewer logits at a time cost next to nothing until passes become small, recomputing a layer costs a third of a pass, a
slot fewer costs decode steps. Nothing is chosen where there is room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_cli.config.auto import AUTO
from grpo_cli.config.prepare import Prepared
from grpo_cli.memory.explain import NOTHING_FITS, breakdown
from grpo_cli.memory.plan import MemoryPlan
from grpo_cli.memory.planner import CHUNK, OFFLOAD, PARK, RECOMPUTE, SLOTS, TOKENS, Planner, Values, process_alone
from grpo_cli.settings import RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib, shown
from grpo_cli.support.memory import free_bytes, resident_bytes, total_bytes

# What updates may do, the cheapest first; the micro-batch is the largest with which each of them fits.
_FEWER_LOGITS, _RECOMPUTED, _OFFLOADED = {CHUNK: 128}, {RECOMPUTE: "full"}, {RECOMPUTE: "full", OFFLOAD: True}
_WAYS: tuple[Values, ...] = ({}, _FEWER_LOGITS, _RECOMPUTED, {**_RECOMPUTED, **_FEWER_LOGITS})
_WAYS += _OFFLOADED, {**_OFFLOADED, **_FEWER_LOGITS}
SHARE = 0.9  # of free memory: plans are meant to be within a tenth of what a run takes
# Of the given memory, and on a CPU at least so many bytes, by which runs of the same settings differ.
MARGIN, BESIDE = 0.95, 32 * 2**20
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

    values: dict[str, Any]
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


def room_of(settings: RunSettings, device: torch.device, workspace: int, warn: Callable[[str], None]) -> int:
    """Return the bytes that the run may hold, the program's `workspace` among them. UserError for more than the machine
    has; if less is free than was typed, what is free."""
    held = resident_bytes() if device.type == "cpu" else workspace
    free = free_bytes(device)
    given, free = settings.fit_bytes, free + held
    if given is None:
        return int(SHARE * (free - held)) + held
    whole = total_bytes(device)
    if given > whole:
        raise UserError(
            f"fit={settings.fit}: the machine has {gib(whole)}; fit=auto takes what is free of it ({gib(free)})"
        )
    if given > free:
        warn(f"fit={settings.fit}: only {gib(free)} are free here, which is planned for; end what holds the rest")
    return within(min(given, free), device)


def within(given: int, device: torch.device) -> int:
    """Return the bytes of `given` that a plan may reach."""
    return max(0, min(int(MARGIN * given), given - (BESIDE if device.type == "cpu" else 0)))


def choose(run: Prepared[Any], typed: Set[str], say: Callable[[str], None]) -> tuple[str, ...]:
    """Choose for a run on its own device, report it, and return the choices as they would be typed: with `fit` of all
    that is not typed, else the micro-batch, for which updates alone are planned."""
    planner = Planner.of(run, run.device)
    planner.plan()  # loads libraries, which the program then holds
    workspace = process_alone(run.device)
    planner = replace(planner, step=replace(planner.step, workspace=workspace))
    room, settings = room_of(run.settings, run.device, workspace, say), run.settings
    if settings.fit == "none" or settings.resume is not None:
        name, planner, may = f"{TOKENS}=auto", planner.of_updates, frozenset({TOKENS})
    else:
        name, may = f"fit={settings.fit}", choosable(planner, typed)
    fitted = chosen(planner, room, may, name)
    for line in fitted.lines(name, room):
        say(line)
    infinite = ("sampler=infinite",) if SLOTS in fitted.values and "slots" not in settings.parts["sampler"] else ()
    return (*infinite, *(f"{key}={shown(value)}" for key, value in fitted.values.items()))


def choosable(planner: Planner, typed: Set[str]) -> frozenset[str]:
    """Return the keys that may be chosen beside these typed ones."""
    may = {TOKENS, CHUNK, RECOMPUTE, SLOTS} | ({OFFLOAD, PARK} if planner.device.type == "cuda" else set())
    sampler = planner.step.sampler
    if sampler is None or "sampler.kv_budget" in typed or ("sampler" in typed and sampler.all_at_once):
        may.remove(SLOTS)
    return frozenset(may - typed)


def chosen(planner: Planner, room: int, may: Set[str], name: str) -> Fitted:
    """Choose for `room` bytes among the keys that `may` be chosen: for updates, then for rollouts; and drop what other
    choices have made unnecessary. UserError with the least that would do if none suffices."""

    def fits(values: Values) -> bool:
        return planner.plan(values).peak <= room

    auto = planner.run.settings.train.micro_batch_tokens == AUTO
    updates = planner.of_updates
    values = {} if not auto and updates.plan().peak <= room else _of_updates(updates, room, may)
    for more in ({}, {PARK: True}) if PARK in may else ({},):
        tried = {**values, **more}
        slots = planner.most(SLOTS, room, tried) if SLOTS in may and not fits(tried) else None
        tried |= {} if slots is None else {SLOTS: slots}
        if fits(tried):
            break
    else:
        raise _refused(planner, room, may, name)
    for key in [key for key in tried if not (auto and key == TOKENS)]:
        less = {other: value for other, value in tried.items() if other != key}
        tried = less if fits(less) else tried
    return Fitted(tried, planner.plan(tried), planner.plan().peak)


def _of_updates(planner: Planner, room: int, may: Set[str]) -> dict[str, Any]:
    """Return the first way in which updates fit with passes that are not small, else the leanest; and the most tokens
    of a pass."""
    step = planner.step
    ways = [{**way, CHUNK: min(128, step.chunk)} if CHUNK in way else way for way in _WAYS if way.keys() <= may]
    few = {TOKENS: min(FEW_TOKENS, step.tokens)} if TOKENS in may else {}
    way = next((way for way in ways if planner.plan({**way, **few}).peak <= room), ways[-1])
    return {**way, **({TOKENS: min(planner.most(TOKENS, room, way) or 1, step.tokens)} if few else {})}


def _refused(planner: Planner, room: int, may: Set[str], name: str) -> UserError:
    """Build the error with everything that may be chosen at its smallest."""
    leanest = [way for way in _WAYS if way.keys() <= may][-1]
    least = planner.plan({**leanest, **{key: 1 for key in (TOKENS, SLOTS) if key in may}})
    beside = BESIDE if planner.device.type == "cpu" else 0
    enough = math.ceil(max(least.peak / MARGIN, least.peak + beside) / 2**20)
    return UserError(
        f"{name}: at most {gib(room)} may be held, and the least that would do with what is typed is "
        f"{gib(least.peak)}: give fit={enough}MiB, leave out typed settings, or take {NOTHING_FITS}\n"
        + "\n".join(breakdown(least, least.fullest))
    )
