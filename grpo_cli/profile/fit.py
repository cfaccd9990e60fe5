"""`fit=<bytes>|auto`: what a run does to fit into memory, chosen before it begins from predicted bytes.

Only settings that change no expectation, and none that was typed. Those that cost least come first: fewer tokens in a
pass and fewer logits at a time cost next to nothing until passes become small, recomputing a layer costs a third of a
pass, a slot fewer costs decode steps. Nothing is chosen where there is room. The optimizer is left alone: another one
would learn something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from grpo_cli.config.auto import AUTO
from grpo_cli.config.prepare import Prepared
from grpo_cli.engine.batching import DEFAULT_SLOTS
from grpo_cli.model.anatomy import has_dropout
from grpo_cli.profile.advice import NOTHING_FITS, TOKENS
from grpo_cli.profile.estimate import Estimator, Prediction, StepShape, most_tokens, parts_of, rows_of, with_tokens
from grpo_cli.profile.from_settings import estimator_of, process_alone, shapes_of, step_of
from grpo_cli.profile.micro_batch import SHARE
from grpo_cli.profile.shapes import ShapeModel
from grpo_cli.settings import RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib, parse_bytes, shown
from grpo_cli.support.memory import free_bytes, resident_bytes

Values = Mapping[str, Any]  # by dotted key
SLOTS = "sampler.slots"
CHUNK, RECOMPUTE = "train.logprob_chunk", "model.gradient_checkpointing"
OFFLOAD, PARK = "model.offload_activations", "optim.park"
# What updates may do, the cheapest first; the micro-batch is the largest with which each of them fits.
_CHUNKED = {CHUNK: 128}
_WAYS: tuple[Values, ...] = ({}, _CHUNKED, {RECOMPUTE: "full"}, {RECOMPUTE: "full", **_CHUNKED})
_ON_A_GPU: tuple[Values, ...] = ({RECOMPUTE: "full", OFFLOAD: True}, {RECOMPUTE: "full", OFFLOAD: True, **_CHUNKED})
# Of the given memory, and on a CPU at least so many bytes, by which runs of the same settings differ.
MARGIN, BESIDE = 0.95, 32 * 2**20
# A pass of fewer tokens is slower than recomputing in a larger one.
FEW_TOKENS = 1024
_COSTS = {
    CHUNK: "next to nothing: logits in more and smaller parts",
    RECOMPUTE: "about a third of the time of updates",
    OFFLOAD: "copies between the GPU and the host in updates",
    PARK: "copies of the optimizer's state twice a step",
}


@dataclass(frozen=True)
class Choice:
    """A setting, what it costs, and by how many bytes less phases take than without it."""

    key: str
    value: Any
    costs: str
    saves: int


@dataclass(frozen=True)
class Fitted:
    """What was chosen, and the bytes at the fullest moment with all of it and with none; every rollout at full
    length."""

    choices: tuple[Choice, ...]
    peak: int
    before: int
    phase: str

    @property
    def values(self) -> dict[str, Any]:
        return {choice.key: choice.value for choice in self.choices}

    def lines(self, asked: str, room: int) -> Iterator[str]:
        """As a table."""
        yield f"{asked}: at most {gib(self.peak)} of {gib(room)} are expected to be held, in {self.phase}"
        if not self.choices:
            yield "  nothing had to be chosen: all of it fits as it is"
            return
        yield f"  without these choices it would be {gib(self.before)}:"
        rows = [(f"{one.key}={shown(one.value)}", f"saves {gib(one.saves)}", one.costs) for one in self.choices]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        for word, saved, costs in rows:
            yield f"  {word:{widths[0]}}  {saved:{widths[1]}}  costs {costs}"


def room_of(settings: RunSettings, device: torch.device, other: int, warn: Callable[[str], None]) -> int:
    """Bytes that the run may hold, the program's `other` ones among them. UserError for none, or for more than the
    machine has; with less free than was asked for, what is free."""
    free = free_bytes(device) + (resident_bytes() if device.type == "cpu" else other)
    if settings.fit == "auto":
        return int(SHARE * free)
    if re.fullmatch(r"[0.]+ *[a-zA-Z]*", str(settings.fit)):
        raise UserError(f"fit={settings.fit} leaves a run nothing: give what it may take, or fit=auto for what is free")
    asked, whole = parse_bytes(settings.fit, "fit"), int(psutil.virtual_memory().total)
    if device.type == "cuda":
        whole = int(torch.cuda.get_device_properties(device).total_memory)
    if asked > whole:
        raise UserError(
            f"fit={settings.fit}: the machine has {gib(whole)}; fit=auto takes what is free of it ({gib(free)})"
        )
    if asked > free:
        warn(f"fit={settings.fit}: only {gib(free)} are free here, which is planned for; end what holds the rest")
    return within(min(asked, free), device)


def within(given: int, device: torch.device) -> int:
    """Bytes that may be expected of a run in so many."""
    return max(0, min(int(MARGIN * given), given - (BESIDE if device.type == "cpu" else 0)))


def planned(
    run: Prepared[Any],
    device: torch.device,
    room: int,
    typed: Set[str],
    other: int,
    shapes: ShapeModel | None = None,
) -> Fitted:
    """The choices for `room` bytes, none of them of a key that is `typed`. UserError with the least that would do if
    none suffice. `shapes` are the run's, if they were asked already."""
    asks = _Asks(run, device, other, shapes)
    before = asks.prediction({})
    values = _chosen(asks, room, typed)
    last = asks.prediction(values)
    choices = []
    for key, value in values.items():
        without = asks.prediction({name: kept for name, kept in values.items() if name != key})
        choices.append(Choice(key, value, asks.cost(key, value), max(0, without.peak - last.peak)))
    return Fitted(tuple(choices), last.peak, before.peak, last.fullest)


def words(settings: RunSettings, values: Values) -> tuple[str, ...]:
    """The choices as they would be typed."""
    infinite = ("sampler=infinite",) if SLOTS in values and "slots" not in settings.parts["sampler"] else ()
    return (*infinite, *(f"{key}={str(value).lower()}" for key, value in values.items()))


def decided(run: Prepared[Any], typed: Set[str], say: Callable[[str], None]) -> Fitted:
    """What `fit` makes of the run, said as a table."""
    shapes = shapes_of(run.settings.model, run.device)
    _Asks(run, run.device, 0, shapes).prediction({})  # planning loads libraries, which the program then holds
    other = process_alone(run.device)
    room = room_of(run.settings, run.device, other, say)
    plan = planned(run, run.device, room, typed, other, shapes)
    for line in plan.lines(f"fit={run.settings.fit}", room):
        say(line)
    return plan


def typed_keys(overrides: Sequence[str]) -> frozenset[str]:
    """The keys of these words."""
    return frozenset(word.lstrip("+~").partition("=")[0] for word in overrides)


class _Asks:
    """Predictions of a run with some of its settings changed, each made once."""

    def __init__(self, run: Prepared[Any], device: torch.device, other: int, shapes: ShapeModel | None) -> None:
        self.run, self.device, self.other = run, device, other
        model = run.settings.model
        known = model.gradient_checkpointing, model.offload_activations
        self._shapes: dict[Any, ShapeModel] = {} if shapes is None else {known: shapes}
        self._found: dict[Any, Prediction] = {}

    def of(self, values: Values) -> tuple[Estimator, StepShape]:
        """With rollouts of full length."""
        settings = self.run.settings
        for group in ("model", "train", "optim"):
            changed = {key.partition(".")[2]: v for key, v in values.items() if key.startswith(f"{group}.")}
            settings = replace(settings, **{group: replace(getattr(settings, group), **changed)})
        if settings.model.gradient_checkpointing != "full":  # its inputs are what is offloaded
            settings = replace(settings, model=replace(settings.model, offload_activations=False))
        if settings.train.micro_batch_tokens == AUTO:
            settings = replace(settings, train=replace(settings.train, micro_batch_tokens=1 << 30))
        key = settings.model.gradient_checkpointing, settings.model.offload_activations
        shapes = self._shapes[key] = self._shapes.get(key) or shapes_of(settings.model, self.device)
        _, step = step_of(replace(self.run, settings=settings, device=self.device), has_dropout(shapes.model))
        if SLOTS in values and step.engine is not None:
            step = replace(step, engine=replace(step.engine, sampler=step.engine.sampler.with_slots(values[SLOTS])))
        return estimator_of(settings, shapes, self.device, self.other), step.at_full_length()

    def prediction(self, values: Values, updates: bool = False) -> Prediction:
        key = (*sorted(values.items()), updates)
        if key not in self._found:
            estimator, step = self.of(values)
            self._found[key] = estimator.predict(_updates(step) if updates else step)
        return self._found[key]

    def cost(self, key: str, value: Any) -> str:
        _, step = self.of({})
        if key == TOKENS:
            rows, ways = rows_of(step.rollouts, step.m), (step.forward, with_tokens(step, value).forward)
            few, many = (len(parts_of(way, rows)) for way in ways)
            return f"{many} passes over what a step trains on in place of {few}"
        if key == SLOTS:
            lengths = step.rollouts.lengths
            steps = [max(max(lengths), -(-sum(lengths) // slots)) for slots in (value, self._slots(step))]
            return f"at most {steps[0]} decode steps in place of {steps[1]}"
        return _COSTS[key]

    def _slots(self, step: StepShape) -> int:
        assert step.engine is not None, "asked only where the engine is ours"
        asked = len(step.rollouts.lengths)
        sampler = step.engine.sampler
        return asked if sampler.all_at_once else min(asked, sampler.slots or DEFAULT_SLOTS)


def _updates(step: StepShape) -> StepShape:
    return replace(step, engine=None, evaluation=None)


def _chosen(asks: _Asks, room: int, typed: Set[str]) -> dict[str, Any]:
    """Return what updates need, then what rollouts need beside it."""
    values = _of_updates(asks, room, typed)
    return _needed(asks, values | _of_rollouts(asks, values, room, typed), room)


def _needed(asks: _Asks, values: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Without what other choices have made unnecessary."""
    for key in tuple(values):
        less = {name: value for name, value in values.items() if name != key}
        values = less if asks.prediction(less).peak <= room else values
    return dict(values)


def _of_updates(asks: _Asks, room: int, typed: Set[str]) -> dict[str, Any]:
    """The first way in which updates fit with passes that are not small, else the leanest; then the largest passes."""
    settings = asks.run.settings
    given = settings.train.micro_batch_tokens != AUTO
    if given and asks.prediction({}, updates=True).peak <= room:
        return {}
    every = (*_WAYS, *(_ON_A_GPU if asks.device.type == "cuda" else ()))
    ways = [way for way in every if not typed & way.keys() and not any(_has(settings, *one) for one in way.items())]
    _, step = asks.of({})
    few = {} if given and TOKENS in typed else {TOKENS: min(FEW_TOKENS, most_tokens(step), step.forward.tokens)}
    fits = (way for way in ways if asks.prediction({**way, **few}, updates=True).peak <= room)
    way = next(fits, ways[-1])
    if not few:
        if asks.prediction(way, updates=True).peak > room:
            raise _refused(asks, room, typed)
        return dict(way)
    estimator, small = asks.of({**way, **few})
    most = estimator.micro_batch(_updates(small), room)
    if most is None:
        raise _refused(asks, room, typed)
    return {**way, TOKENS: min(most or most_tokens(step), step.forward.tokens)}


def _has(settings: RunSettings, key: str, value: Any) -> bool:
    """Whether it saves as much by itself."""
    group, _, name = key.partition(".")
    now = getattr(getattr(settings, group), name)
    return bool(now <= value) if key == CHUNK else bool(now == value)


def _of_rollouts(asks: _Asks, values: Values, room: int, typed: Set[str]) -> dict[str, Any]:
    """The most slots that fit beside these choices; on a GPU also with the optimizer's state away."""
    parked = {PARK: True} if asks.device.type == "cuda" and PARK not in typed else {}
    for more in ({}, parked):
        if asks.prediction({**values, **more}).peak <= room:
            return dict(more)
        estimator, step = asks.of({**values, **more})
        fixed = typed & {SLOTS, "sampler.kv_budget"}
        if step.engine is None or fixed or ("sampler" in typed and step.engine.sampler.all_at_once):
            continue
        slots = estimator.slots(step, room)
        if slots:
            return {**more, SLOTS: slots}
    raise _refused(asks, room, typed)


def _refused(asks: _Asks, room: int, typed: Set[str]) -> UserError:
    """With everything that may be chosen at its smallest."""
    ways = _ON_A_GPU if asks.device.type == "cuda" else _WAYS
    values = {key: value for key, value in {**ways[-1], TOKENS: 1, SLOTS: 1}.items() if key not in typed}
    if "sampler" in typed and "slots" not in asks.run.settings.parts["sampler"]:
        values.pop(SLOTS, None)
    least = asks.prediction(values)
    ours = sorted(typed & {CHUNK, RECOMPUTE, OFFLOAD, PARK, TOKENS, SLOTS, "sampler", "sampler.kv_budget"})
    kept = f" with {', '.join(ours)} as typed, which stay as they are: leave them out, or" if ours else ":"
    beside = BESIDE if asks.device.type == "cpu" else 0
    enough = math.ceil(max(least.peak / MARGIN, least.peak + beside) / 2**20)
    return UserError(
        f"fit={asks.run.settings.fit}: at most {gib(room)} may be held, and the least that would do is "
        f"{gib(least.peak)} (in {least.fullest}){kept} give fit={enough}MiB, or take {NOTHING_FITS}"
    )
