"""`fit=<bytes>|auto` and `train.micro_batch_tokens=auto`: settings with which a run fits into memory, chosen by a plan.

It changes only settings that leave expected results as they are, and none that the user typed. The cheapest come first:
fewer tokens in a pass and fewer logits at a time cost little until passes become small, recomputing layers costs a
third of a pass, fewer slots cost decode steps. Last, on a GPU, the optimizer's state moves to the host. Memory that
is left on a GPU goes to more slots, unless the user has set their number.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_cli.config.auto import AUTO
from grpo_cli.config.prepare import Prepared
from grpo_cli.memory.out_of_memory import breakdown
from grpo_cli.memory.plan import MemoryPlan
from grpo_cli.memory.planner import Planner, Values, not_planned, process_size, with_values
from grpo_cli.settings import CHUNK, OFFLOAD, PARK, RECOMPUTE, SLOTS, STATE, TOKENS, RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib, shown
from grpo_cli.support.memory import free_bytes, total_bytes

# What updates may do, the cheapest first; the micro-batch is the largest with which each of them fits.
_FEWER_LOGITS, _RECOMPUTED, _OFFLOADED = {CHUNK: 128}, {RECOMPUTE: "full"}, {RECOMPUTE: "full", OFFLOAD: True}
_WAYS: tuple[Values, ...] = tuple(way | few for way in ({}, _RECOMPUTED, _OFFLOADED) for few in ({}, _FEWER_LOGITS))
OF_FREE = 0.9  # of free memory: plans are meant to be within a tenth of what a run takes
# A plan may take this share of the limit, and on a CPU leaves at least these bytes, by which equal runs differ.
MARGIN, CPU_RESERVE = 0.95, 32 * 2**20
FEW_TOKENS = 1024  # a pass of fewer is slower than recomputing in a larger one
_COSTS = {
    TOKENS: "costs more and smaller passes",
    CHUNK: "costs next to nothing: logits in more and smaller parts",
    RECOMPUTE: "costs about a third of the time of updates",
    OFFLOAD: "costs copies between the GPU and the host in updates",
    PARK: "costs copies of the optimizer's state twice a step",
    STATE: "costs updates on the CPU, and 12 to 24 bytes of its memory for each trained weight",
    "sampler": "so that rollouts can wait for a slot",
}


@dataclass(frozen=True)
class Fitted:
    """The chosen settings, or the least where nothing fits, the plan with them, and both in lines of text."""

    values: Values
    plan: MemoryPlan
    lines: Sequence[str]


def choose(run: Prepared[Any], typed: Set[str], say: Callable[[str], None]) -> Values:
    """Choose for a run on its own device, report it, and return what was chosen. UserError if nothing fits."""
    planner = Planner.of(run, run.device)
    planner.plan()  # loads libraries, which the program then holds
    workspace = process_size(run.device)
    planner = replace(planner, step=replace(planner.step, workspace=workspace))
    room = room_of(run.settings, run.device, workspace, say)
    found = cheapest_fit(planner, room, typed)
    if found.plan.peak > room:
        raise UserError("\n".join((*found.lines, *breakdown(planner, found.values))))
    say("\n".join((*found.lines, *(f"  not planned: {note}" for note in not_planned(run)))))
    return found.values


def room_of(settings: RunSettings, device: torch.device, held: int, warn: Callable[[str], None]) -> int:
    """Return the bytes that the run may hold, those `held` by the program among them. UserError for more than the
    machine has; if less is free than was typed, what is free."""
    given, free, whole = settings.fit_bytes, free_bytes(device) + held, total_bytes(device)
    if given is None:
        return int(OF_FREE * (free - held)) + held
    if given > whole:
        raise UserError(f"fit={settings.fit}: the machine has {gib(whole)}; fit=auto takes what is free ({gib(free)})")
    if given > free:
        warn(f"fit={settings.fit}: only {gib(free)} are free here, which is planned for; end what holds the rest")
    return within(min(given, free), device)


def within(given: int, device: torch.device) -> int:
    """Return the bytes of `given` that a plan may reach."""
    return max(0, min(int(MARGIN * given), given - (CPU_RESERVE if device.type == "cpu" else 0)))


def choosable(planner: Planner, typed: Set[str]) -> frozenset[str]:
    """Return the keys that may be chosen beside these typed ones."""
    may, optim, train = {TOKENS, CHUNK, RECOMPUTE, SLOTS}, planner.run.settings.optim, planner.run.settings.train
    if planner.device.type == "cuda":
        # The host pins what moves there, rounded up to powers of two.
        fits = not torch.cuda.is_available() or free_bytes(torch.device("cpu")) > 2 * planner.step.optimizer
        moves = fits and optim.name == "adamw" and not (optim.offload or optim.park)
        may |= {OFFLOAD, PARK, STATE} if moves else {OFFLOAD}
    if (sampler := planner.step.sampler) is None or ("sampler" in typed and sampler.all_at_once):
        may.remove(SLOTS)
    if planner.step.chunk <= _FEWER_LOGITS[CHUNK]:
        may.remove(CHUNK)
    return frozenset(may - typed | ({TOKENS} if train.micro_batch_tokens == AUTO else set()))


def cheapest_fit(planner: Planner, room: int, typed: Set[str]) -> Fitted:
    """Choose for `room` bytes: with `fit` of all settings that were not typed, else the micro-batch alone, for updates.
    Where nothing fits, return the least that would do."""
    settings, updates = planner.run.settings, replace(planner, step=replace(planner.step, sampler=None))
    name, may = f"fit={settings.fit}", choosable(planner, typed)
    if settings.fit == "none" or settings.resume is not None:
        name, may, planner = f"{TOKENS}=auto, of updates alone", frozenset({TOKENS}), updates
    waiting = {"sampler": "infinite"} if SLOTS in may and "slots" not in settings.parts["sampler"] else {}
    values = _cheapest(planner, updates, room, may, waiting)
    if (least := planner.plan(values)).peak > room:
        enough = gib(1.005 * max(least.peak / MARGIN, least.peak + CPU_RESERVE)).replace(" ", "")  # rounded, not down
        line = f"{name}: at most {gib(room)} may be held, and the least that would do with what is typed is "
        way_out = "end what holds memory" if planner is updates else f"give fit={enough}"
        return Fitted(values, least, [f"{line}{gib(least.peak)}: {way_out}, or leave out typed settings"])
    values, rounds, spare = _with_slots(planner, room, may, values)
    plan, costs = planner.plan(values), {**_COSTS, SLOTS: rounds}
    lines = [f"{name}: at most {gib(plan.peak)} of {gib(room)} are expected to be held, in {plan.fullest}"]
    lines.append(f"  without these it would be {gib(planner.plan().peak)}:" if values else "  all of it fits as it is")
    lines += [f"  {f'{key}={shown(value)}':42}  {costs[key]}" for key, value in values.items()]
    return Fitted(values, plan, [*lines, *spare])


def _cheapest(planner: Planner, updates: Planner, room: int, may: Set[str], waiting: Values) -> Values:
    """Return the first values that fit: the cheapest way in which updates fit with passes that are not small, then the
    most tokens of a pass and the most slots; if that does not do, with the optimizer's state parked, or offloaded.
    Where nothing fits, return the values that take the least."""
    settings, small = planner.run.settings, {TOKENS: FEW_TOKENS} if TOKENS in may else {}
    ways = [  # beside what is typed
        {key: value for key, value in way.items() if key in may}
        for way in _WAYS
        if with_values(settings, {key: way[key] for key in way.keys() - may}) == settings
    ]
    auto = settings.train.micro_batch_tokens == AUTO

    def fits(values: Values, of: Planner = planner) -> bool:
        return of.plan(values).peak <= room

    elsewhere: list[Values] = [{}, *({key: True} for key in (PARK, STATE) if key in may)]
    for more in elsewhere:
        found = (way for way in ways for few in ({}, small) if fits({**more, **way, **few}, updates))
        values: dict[str, Any] = {**next(found, ways[-1]), **more}
        for key, of in ((TOKENS, updates), (SLOTS, planner)):
            if key in may and ((auto and key == TOKENS) or not fits(values, of)):
                values |= {**(waiting if key == SLOTS else {}), key: max(1, most(of, key, room, values))}
        if fits(values):
            return values
    return {**ways[-1], **elsewhere[-1], **waiting, **dict.fromkeys(may & {TOKENS, SLOTS}, 1)}


def _with_slots(planner: Planner, room: int, may: Set[str], values: Values) -> tuple[Values, str, list[str]]:
    """Return the values, on a GPU with all slots that fit where nobody set a number; what these slots gain or cost; and
    a line if more than were set would fit."""
    sampler, every = planner.step.sampler, planner.step.rollouts.rollouts
    if sampler is None or (SLOTS not in values and planner.device.type != "cuda"):
        return values, "", []
    now, new = sampler.slots_for(every, every), values.get(SLOTS) or max(1, most(planner, SLOTS, room, values))
    if new > now and SLOTS in may and sampler.slots is None:
        values = {**values, SLOTS: new}
    rounds = f"{'gains' if new > now else 'costs'} decode steps: {-(-every // new)} rounds, not {-(-every // now)}"
    return values, rounds, [f"  more slots than were set fit, {new}: {rounds}"] * (new > now and SLOTS not in values)


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
