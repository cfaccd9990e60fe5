"""`fit=<bytes>|auto` and `train.micro_batch_tokens=auto`: settings with which a run fits into memory, chosen by a plan.

Only settings that change no expectation, and none that was typed. The cheapest come first: fewer tokens in a pass and
fewer logits at a time cost next to nothing until passes become small, recomputing a layer costs a third of a pass, a
slot fewer costs decode steps. Nothing is chosen where there is room.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import psutil
import torch

from grpo_cli.config.auto import AUTO
from grpo_cli.config.prepare import Prepared
from grpo_cli.engine.samplers import DEFAULT_SLOTS
from grpo_cli.memory.explain import NOTHING_FITS, breakdown
from grpo_cli.memory.plan import MemoryPlan, StepShape
from grpo_cli.memory.planner import CHUNK, OFFLOAD, PARK, RECOMPUTE, SLOTS, TOKENS, Planner, Values, process_alone
from grpo_cli.settings import RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib, parse_bytes, shown
from grpo_cli.support.memory import free_bytes, resident_bytes

# What updates may do, the cheapest first; the micro-batch is the largest with which each of them fits.
_CHUNKED = {CHUNK: 128}
_WAYS: tuple[Values, ...] = ({}, _CHUNKED, {RECOMPUTE: "full"}, {RECOMPUTE: "full", **_CHUNKED})
_ON_A_GPU: tuple[Values, ...] = ({RECOMPUTE: "full", OFFLOAD: True}, {RECOMPUTE: "full", OFFLOAD: True, **_CHUNKED})
SHARE = 0.9  # of free memory: plans are meant to be within a tenth of what a run takes
# Of the given memory, and on a CPU at least so many bytes, by which runs of the same settings differ.
MARGIN, BESIDE = 0.95, 32 * 2**20
FEW_TOKENS = 1024  # a pass of fewer is slower than recomputing in a larger one
_COSTS = {
    CHUNK: "next to nothing: logits in more and smaller parts",
    RECOMPUTE: "about a third of the time of updates",
    OFFLOAD: "copies between the GPU and the host in updates",
    PARK: "copies of the optimizer's state twice a step",
}
Settings = TypeVar("Settings", bound=RunSettings)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """A setting, what it costs, and by how many bytes the peak is lower than without it."""

    key: str
    value: Any
    costs: str
    saves: int


@dataclass(frozen=True)
class Fitted:
    """What was chosen, the plan with all of it, and the peak with none; every rollout at full length."""

    choices: tuple[Choice, ...]
    plan: MemoryPlan
    before: int

    @property
    def values(self) -> dict[str, Any]:
        return {choice.key: choice.value for choice in self.choices}

    def lines(self, fit: object, room: int) -> Iterator[str]:
        """Format as a table."""
        yield f"fit={fit}: at most {gib(self.plan.peak)} of {gib(room)} are expected to be held, in {self.plan.fullest}"
        if not self.choices:
            yield "  nothing had to be chosen: all of it fits as it is"
            return
        yield f"  without these choices it would be {gib(self.before)}:"
        rows = [(f"{one.key}={shown(one.value)}", f"saves {gib(one.saves)}", one.costs) for one in self.choices]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        for setting, saved, costs in rows:
            yield f"  {setting:{widths[0]}}  {saved:{widths[1]}}  costs {costs}"


def room_of(settings: RunSettings, device: torch.device, workspace: int, warn: Say) -> int:
    """Return the bytes that the run may hold, the program's `workspace` among them. UserError for none, or for more
    than the machine has; if less is free than was typed, what is free."""
    free = free_bytes(device) + (resident_bytes() if device.type == "cpu" else workspace)
    if settings.fit == AUTO:
        return int(SHARE * free)
    if re.fullmatch(r"[0.]+ *[a-zA-Z]*", str(settings.fit)):
        raise UserError(f"fit={settings.fit} leaves a run nothing: give what it may take, or fit=auto for what is free")
    given, whole = parse_bytes(settings.fit, "fit"), int(psutil.virtual_memory().total)
    if device.type == "cuda":
        whole = int(torch.cuda.get_device_properties(device).total_memory)
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


def decided(run: Prepared[Any], typed: Set[str], say: Say) -> Fitted:
    """Choose for a run on its own device, and report it as a table."""
    planner = Planner(run, run.device, 0)
    planner.plan()  # loads libraries, which the program then holds
    workspace = process_alone(run.device)
    planner.full = replace(planner.full, workspace=workspace)
    room = room_of(run.settings, run.device, workspace, say)
    fitted = planned(planner, room, typed)
    for line in fitted.lines(run.settings.fit, room):
        say(line)
    return fitted


def planned(planner: Planner, room: int, typed: Set[str]) -> Fitted:
    """Choose for `room` bytes, nothing that is `typed`. UserError with the least that would do if none suffices."""
    values = _of_updates(planner, room, typed)
    values |= _of_rollouts(planner, values, room, typed)
    for key in tuple(values):  # what other choices have made unnecessary
        less = {name: value for name, value in values.items() if name != key}
        values = less if planner.plan(less).peak <= room else values
    last = planner.plan(values)
    choices = []
    for key, value in values.items():
        without = planner.plan({name: kept for name, kept in values.items() if name != key})
        choices.append(Choice(key, value, _cost(planner.full, key, value), max(0, without.peak - last.peak)))
    return Fitted(tuple(choices), last, planner.plan().peak)


def words(settings: RunSettings, values: Values) -> tuple[str, ...]:
    """Return the choices as they would be typed."""
    infinite = ("sampler=infinite",) if SLOTS in values and "slots" not in settings.parts["sampler"] else ()
    return (*infinite, *(f"{key}={str(value).lower()}" for key, value in values.items()))


def typed_keys(overrides: Sequence[str]) -> frozenset[str]:
    """Return the keys of these words."""
    return frozenset(word.lstrip("+~").partition("=")[0] for word in overrides)


def _of_updates(planner: Planner, room: int, typed: Set[str]) -> dict[str, Any]:
    """Return the first way in which updates fit with passes that are not small, else the leanest; and the most tokens
    of a pass."""
    step, model = planner.full.of_updates, planner.run.settings.model
    given = planner.run.settings.train.micro_batch_tokens != AUTO
    if given and planner.plan({}, step).peak <= room:
        return {}
    has = {CHUNK: step.chunk <= _CHUNKED[CHUNK], RECOMPUTE: model.gradient_checkpointing == "full"}
    has[OFFLOAD] = model.offload_activations
    every = (*_WAYS, *(_ON_A_GPU if planner.device.type == "cuda" else ()))
    ways = [way for way in every if not typed & way.keys() and not any(has[key] for key in way)]
    whole = step.rollouts.tokens(step.m, step.share)
    few = {} if given and TOKENS in typed else {TOKENS: min(FEW_TOKENS, whole, step.tokens)}
    way = next((way for way in ways if planner.plan({**way, **few}, step).peak <= room), ways[-1])
    most = planner.most_tokens(room, way, step) if few else None
    if most is None and (few or planner.plan(way, step).peak > room):
        raise _refused(planner, room, typed)
    return {**way, **({} if most is None else {TOKENS: min(most, step.tokens)})}


def _of_rollouts(planner: Planner, values: Values, room: int, typed: Set[str]) -> dict[str, Any]:
    """Return the most slots that fit beside these choices; on a GPU also with the optimizer's state parked."""
    parked = {PARK: True} if planner.device.type == "cuda" and PARK not in typed else {}
    for more in ({}, parked):
        if planner.plan({**values, **more}).peak <= room:
            return dict(more)
        engine = planner.full.engine
        fixed = typed & {SLOTS, "sampler.kv_budget"}
        if engine is None or fixed or ("sampler" in typed and engine.sampler.all_at_once):
            continue
        slots = planner.most_slots(room, {**values, **more})
        if slots:
            return {**more, SLOTS: slots}
    raise _refused(planner, room, typed)


def _cost(step: StepShape, key: str, value: Any) -> str:
    if key == TOKENS:
        whole = step.tokens_of_update
        few, many = (-(-whole // step.in_a_pass(whole)) for step in (step, replace(step, tokens=value)))
        return f"{many} passes over an update in place of {few}"
    if key == SLOTS and step.engine is not None:
        lengths, sampler = step.rollouts.lengths, step.engine.sampler
        now = len(lengths) if sampler.all_at_once else min(len(lengths), sampler.slots or DEFAULT_SLOTS)
        steps = [max(max(lengths), -(-sum(lengths) // slots)) for slots in (value, now)]
        return f"at most {steps[0]} decode steps in place of {steps[1]}"
    return _COSTS[key]


def _refused(planner: Planner, room: int, typed: Set[str]) -> UserError:
    """With everything that may be chosen at its smallest."""
    ways = _ON_A_GPU if planner.device.type == "cuda" else _WAYS
    values = {key: value for key, value in {**ways[-1], TOKENS: 1, SLOTS: 1}.items() if key not in typed}
    settings = planner.run.settings
    if "sampler" in typed and "slots" not in settings.parts["sampler"]:
        values.pop(SLOTS, None)
    least = planner.plan(values)
    ours = sorted(typed & {CHUNK, RECOMPUTE, OFFLOAD, PARK, TOKENS, SLOTS, "sampler", "sampler.kv_budget"})
    kept = f" with {', '.join(ours)} as typed, which stay as they are: leave them out, or" if ours else ":"
    beside = BESIDE if planner.device.type == "cpu" else 0
    enough = math.ceil(max(least.peak / MARGIN, least.peak + beside) / 2**20)
    return UserError(
        f"fit={settings.fit}: at most {gib(room)} may be held, and the least that would do is "
        f"{gib(least.peak)} (in {least.fullest}){kept} give fit={enough}MiB, or take {NOTHING_FITS}"
    )


def with_tokens(run: Prepared[Settings], device: torch.device, say: Say, room: int | None = None) -> Prepared[Settings]:
    """Replace `train.micro_batch_tokens=auto` by a number, which is reported: the largest with which updates fit `room`
    bytes, by default what is free. UserError if not even one sequence fits."""
    if run.settings.train.micro_batch_tokens != AUTO:
        return run
    workspace = process_alone(device)  # already allocated, so not part of what is free
    room = int(SHARE * free_bytes(device)) + workspace if room is None else room
    planner = Planner(run, device, workspace)
    step = planner.full.of_updates
    count = planner.most_tokens(room, step=step)
    if count is None:
        least = planner.plan({TOKENS: 1}, step)
        raise UserError(
            f"train.micro_batch_tokens=auto: not one sequence fits. It takes at least {gib(least.peak)}, and "
            f"{gib(room)} are free for it:\n" + "\n".join(breakdown(least, least.fullest)) + f"\n  {NOTHING_FITS}"
        )
    all_at_once = count >= step.tokens_of_update
    say(
        f"train.micro_batch_tokens=auto is {count}: {'all of a step at once' if all_at_once else 'the most that fit'}; "
        f"updates are expected to take {gib(planner.plan({TOKENS: count}, step).peak)} of {gib(room)}. Elsewhere "
        f"train.micro_batch_tokens={count} gives the same run"
    )
    return _with(run, count)


def foresee(run: Prepared[Any], say: Say) -> None:
    """Warn before a run on a GPU if its updates are not expected to fit, and name the setting that makes them fit. Not
    on a CPU, whose memory can swap, nor for a resumed run, which has fitted before."""
    if run.device.type != "cuda" or run.settings.resume is not None:
        return
    try:
        planner = Planner(run, run.device, 0)
        step = planner.full.of_updates
        peak, room = planner.plan({}, step).peak, free_bytes(run.device)
        least = planner.plan({TOKENS: 1}, step).peak
    except (UserError, RuntimeError):
        return  # not an ordinary model: the run itself will show
    if peak > room:
        fits = "train.micro_batch_tokens=auto makes them fit" if least <= SHARE * room else NOTHING_FITS
        say(f"updates are expected to take {gib(peak)}, and {gib(room)} of the GPU are free: {fits}")


def _with(run: Prepared[Settings], tokens: int) -> Prepared[Settings]:
    train = replace(run.settings.train, micro_batch_tokens=tokens)
    return replace(run, settings=replace(run.settings, train=train))
