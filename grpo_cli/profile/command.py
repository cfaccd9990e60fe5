"""`grpo profile`: a run set up as for training, measured for a few steps, and predicted from shapes."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from hydra.core.hydra_config import HydraConfig

from grpo_cli import __version__, experiment
from grpo_cli.config.instantiate import make
from grpo_cli.config.prepare import Prepared
from grpo_cli.engine.order.lengths import read_trace
from grpo_cli.interfaces import Advantage
from grpo_cli.model.anatomy import has_dropout
from grpo_cli.profile import advice, fit, gpus
from grpo_cli.profile.findings import Findings, metrics, versions, write
from grpo_cli.profile.forced_lengths import NEVER, Lengths, ProfiledEngine, forced
from grpo_cli.profile.from_settings import (
    estimator_of,
    not_predicted,
    process_alone,
    shapes_of,
    step_of,
)
from grpo_cli.profile.measure import Measured, Probe, Subject, measure, write_trace
from grpo_cli.profile.micro_batch import decided
from grpo_cli.profile.shapes import ShapeModel
from grpo_cli.settings import ProfileRunSettings, ProfileSettings
from grpo_cli.step import Step
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib, parse_bytes
from grpo_cli.types import Record, ScoredGroup

Say = Callable[[str], None]


def profile(run: Prepared[ProfileRunSettings], command: Sequence[str], say: Say, warn: Say) -> Findings:
    """Measure (unless `profile.plan_only`), predict, and write `profile.json`; the logger gets the numbers."""
    settings, device = run.settings, run.device
    if settings.profile.fit is None and settings.fit not in ("none", "auto"):
        settings = replace(settings, profile=replace(settings.profile, fit=str(settings.fit)))
        run = replace(run, settings=settings)
    planned = torch.device("cuda") if settings.profile.for_gpu else device
    lengths, room = _lengths(settings), _room(settings, device)
    run = decided(run, planned, say, None if settings.profile.fit is None else room)
    settings = run.settings
    other = process_alone(planned)
    measured, shapes = None, shapes_of(settings.model, run.device)
    folder = Path(settings.run_dir)
    if not settings.profile.plan_only:
        measured = _measured(run, lengths, folder, say, warn)
    seen = None if measured is None else (measured.rollouts, measured.evaluation)
    _, step = step_of(replace(run, device=planned), has_dropout(shapes.model), lengths, seen)
    estimator = estimator_of(settings, shapes, planned, other)
    looked_at = lambda what: say(f"predicting from shapes: {what}")  # noqa: E731
    predicted = estimator.predict(step, looked_at)
    at_most = estimator.predict(step.at_full_length(), lambda what: looked_at(f"{what} at full length"))
    largest = estimator.largest(step, room, looked_at)
    findings = Findings(
        command=tuple(command),
        settings=dataclasses.asdict(settings),
        versions={"grpo_cli": __version__, "python": platform.python_version(), **versions("torch", "transformers")},
        device=_named(device) if planned.type == device.type else _planned(settings.profile, room),
        threads=torch.get_num_threads(),
        measured=measured,
        predicted=predicted,
        at_most=at_most,
        room=room,
        largest=largest,
        not_predicted=not_predicted(run),
    )
    write(findings, folder)
    if settings.profile.fit is not None:
        _say_what_fits(run, planned, room, other, shapes, say)
    _log(settings, findings, folder, say, warn)
    return findings


def _say_what_fits(
    run: Prepared[ProfileRunSettings], device: torch.device, room: int, other: int, shapes: ShapeModel, say: Say
) -> None:
    """What `fit` would choose for this room; nothing of it is used here."""
    typed, room = fit.typed_keys(HydraConfig.get().overrides.task), fit.within(room, device)
    try:
        for line in fit.planned(run, device, room, typed, other, shapes).lines(f"fit={run.settings.profile.fit}", room):
            say(line)
    except UserError as error:
        say(str(error))


def _planned(profile: ProfileSettings, room: int) -> str:
    kind = profile.for_gpu if isinstance(profile.for_gpu, str) else "a GPU"
    return f"{kind} of {profile.fit or gib(room)}"


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def _lengths(settings: ProfileRunSettings) -> Lengths | None:
    wanted = settings.profile
    if wanted.lengths != "natural" and not experiment.is_ours(settings):
        raise UserError(f"profile.lengths={wanted.lengths} forces lengths, which only engine=torch can do")
    trace = read_trace(wanted.trace_file, "profile.trace_file") if wanted.trace_file is not None else ()
    return forced(wanted.lengths, wanted.mean, wanted.cv, settings.seed, trace)


def _measured(
    run: Prepared[ProfileRunSettings], lengths: Lengths | None, folder: Path, say: Say, warn: Say
) -> Measured:
    settings = run.settings
    probe = Probe(run.device)
    instead: dict[str, Any] = {} if lengths is None else {"eos_token_ids": (NEVER,)}
    with advice.memory_explained(run):
        bench = experiment.set_up(run, settings.model, meter=probe, warn=warn, **instead)
        engine = ProfiledEngine(bench.engine, lengths)
        bench = replace(bench, engine=engine)
        rules = replace(run.rules, advantage=partial(_never_all_equal, run.rules.advantage))
        parts = experiment.parts_of(replace(run, rules=rules), bench, (), probe, say, warn)
        seen = Subject(Step(settings, parts), settings, parts, engine, probe)
        measured = measure(seen, settings.profile, settings.profile.eval and settings.eval.every > 0, say)
        if settings.profile.trace:
            folder.mkdir(parents=True, exist_ok=True)
            for path in write_trace(seen, folder):
                say(f"wrote {path}")
    return measured


def _never_all_equal(rule: Advantage, group: ScoredGroup, kept: Sequence[int]) -> torch.Tensor:
    """A group's advantages, replaced by ones where all are 0. Completions of forced length often all earn nothing, and
    without a gradient the optimizer would neither step nor allocate its state."""
    advantages = rule(group, kept)
    return advantages if advantages.any() else torch.ones_like(advantages)


def _room(settings: ProfileRunSettings, device: torch.device) -> int:
    if settings.profile.fit is not None:
        return parse_bytes(settings.profile.fit, "profile.fit")
    if isinstance(settings.profile.for_gpu, str):
        return int(gpus.MEMORY[settings.profile.for_gpu])
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device=cuda is being planned on a machine without a GPU: give its memory, as in profile.fit=80GB"
        )
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def _log(settings: ProfileRunSettings, findings: Findings, folder: Path, say: Say, warn: Say) -> None:
    offered = {"run_dir": folder, "config": dataclasses.asdict(settings), "say": say, "warn": warn}
    tracker = make("logger", settings.parts["logger"], offered)
    tracker.log(Record(0, metrics(findings)))
    tracker.close({"status": "completed", **metrics(findings)})
