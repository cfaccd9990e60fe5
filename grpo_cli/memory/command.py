"""`grpo profile`: a run set up as for training, measured for a few steps, and planned from shapes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from grpo_cli import __version__, experiment
from grpo_cli.config.instantiate import make
from grpo_cli.config.prepare import Prepared
from grpo_cli.interfaces import Advantage
from grpo_cli.memory import fit, gpus
from grpo_cli.memory.explain import memory_explained
from grpo_cli.memory.findings import MOST, Findings
from grpo_cli.memory.lengths import NEVER, Lengths, ProfiledEngine, forced
from grpo_cli.memory.measure import Measured, Probe, Subject, measure, write_trace
from grpo_cli.memory.planner import SLOTS, TOKENS, Planner, not_planned, process_alone
from grpo_cli.settings import ProfileRunSettings
from grpo_cli.step import Step
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib, parse_bytes
from grpo_cli.types import Record, ScoredGroup

Say = Callable[[str], None]


def profile(run: Prepared[ProfileRunSettings], command: Sequence[str], say: Say, warn: Say) -> Findings:
    """Measure (unless `profile.plan_only`), plan, and write `profile.json`; the logger gets the numbers."""
    device = torch.device("cuda") if run.settings.profile.for_gpu else run.device
    sized = run.settings.fit not in ("none", "auto")
    lengths, room = _lengths(run.settings), _room(run.settings, device)
    run = fit.with_tokens(run, device, say, room if sized else None)
    settings, folder = run.settings, Path(run.settings.run_dir)
    workspace = process_alone(device)
    measured = None if settings.profile.plan_only else _measured(run, lengths, folder, say, warn)
    seen = None if measured is None else (measured.rollouts, measured.evaluation)
    planner = Planner(run, device, workspace, lengths, seen)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    findings = Findings(
        about={
            "command": list(command),
            "device": _named(run.device) if device == run.device else f"{_gpu(settings)} of {gib(room)}",
            "threads": torch.get_num_threads(),
            "versions": {"grpo_cli": __version__, "python": platform.python_version(), **versions},
            "settings": dataclasses.asdict(settings),
        },
        measured=measured,
        predicted=planner.plan(step=planner.step),
        at_most=planner.plan(),
        room=room,
        largest=_largest(planner, room),
        not_predicted=not_planned(run),
    )
    findings.write(folder)
    if sized:
        _say_what_fits(planner, room, fit.typed_keys(command), say)
    offered = {"run_dir": folder, "config": dataclasses.asdict(settings), "say": say, "warn": warn}
    tracker = make("logger", settings.parts["logger"], offered)
    tracker.log(Record(0, findings.metrics))
    tracker.close({"status": "completed", **findings.metrics})
    return findings


def _largest(planner: Planner, room: int) -> dict[str, int | None]:
    """Return the largest value of each setting that fits, each alone; None if none does, 0 if any does."""
    step = planner.full
    limits = {"n": (planner.most(step.with_n, MOST, room), MOST)}
    if step.engine is not None:
        limits[SLOTS] = planner.most_slots(room), len(step.rollouts.lengths)
    limits[TOKENS] = planner.most_tokens(room), step.rollouts.tokens(step.m, step.share)
    return {key: 0 if found == enough else found for key, (found, enough) in limits.items()}


def _say_what_fits(planner: Planner, room: int, typed: Set[str], say: Say) -> None:
    """Report what `fit` would choose for this room; nothing of it is used here."""
    room = fit.within(room, planner.device)
    try:
        for line in fit.planned(planner, room, typed).lines(planner.run.settings.fit, room):
            say(line)
    except UserError as error:
        say(str(error))


def _gpu(settings: ProfileRunSettings) -> str:
    return settings.profile.for_gpu if isinstance(settings.profile.for_gpu, str) else "a GPU"


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def _lengths(settings: ProfileRunSettings) -> Lengths | None:
    wanted = settings.profile
    if wanted.lengths != "natural" and not experiment.is_ours(settings):
        raise UserError(f"profile.lengths={wanted.lengths} forces lengths, which only engine=torch can do")
    return forced(wanted.lengths, wanted.mean, wanted.cv, settings.seed)


def _measured(
    run: Prepared[ProfileRunSettings], lengths: Lengths | None, folder: Path, say: Say, warn: Say
) -> Measured:
    settings = run.settings
    probe = Probe(run.device)
    instead: dict[str, Any] = {} if lengths is None else {"eos_token_ids": (NEVER,)}
    with memory_explained(run):
        bench = experiment.set_up(run, settings.model, meter=probe, warn=warn, **instead)
        engine = ProfiledEngine(bench.engine, lengths)
        bench = replace(bench, engine=engine)
        rules = replace(run.rules, advantage=partial(_never_all_equal, run.rules.advantage))
        parts = experiment.parts_of(replace(run, rules=rules), bench, (), probe, say, warn)
        subject = Subject(Step(settings, parts), settings, parts, engine, probe)
        measured = measure(subject, settings.profile, settings.profile.eval and settings.eval.every > 0, say)
        if settings.profile.trace:
            folder.mkdir(parents=True, exist_ok=True)
            write_trace(subject, folder / "trace.json.gz")
            say(f"wrote {folder / 'trace.json.gz'}")
    return measured


def _never_all_equal(rule: Advantage, group: ScoredGroup, kept: Sequence[int]) -> torch.Tensor:
    """Return a group's advantages, ones where all are 0. Completions of forced length often all earn nothing, and
    without a gradient the optimizer would neither step nor allocate its state."""
    advantages = rule(group, kept)
    return advantages if advantages.any() else torch.ones_like(advantages)


def _room(settings: ProfileRunSettings, device: torch.device) -> int:
    if settings.fit not in ("none", "auto"):
        return parse_bytes(settings.fit, "fit")
    if isinstance(settings.profile.for_gpu, str):
        return int(gpus.MEMORY[settings.profile.for_gpu])
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda is planned on a machine without a GPU: give its memory, as in fit=80GB")
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)
