"""`grpo profile`: a run set up as for training, measured for a few steps, and planned from shapes."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console

from grpo_cli import experiment
from grpo_cli.config.auto import AUTO
from grpo_cli.config.overrides import key_of
from grpo_cli.config.prepare import Prepared
from grpo_cli.memory import fit, gpus
from grpo_cli.memory.explain import memory_explained
from grpo_cli.memory.findings import MOST, show
from grpo_cli.memory.measure import measure
from grpo_cli.memory.plan import KINDS
from grpo_cli.memory.planner import TOKENS, Planner, largest, not_planned, process_alone
from grpo_cli.runs.files import write_object
from grpo_cli.runs.layout import PROFILE
from grpo_cli.runs.record import code_version
from grpo_cli.settings import ProfileRunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib
from grpo_cli.support.memory import total_bytes

Say = Callable[[str], None]


def profile(run: Prepared[ProfileRunSettings], typed: Sequence[str], say: Say, warn: Say, console: Console) -> int:
    """Measure (unless `profile.plan_only`), plan, write `profile.json` and show it; return the peak memory. What `fit`
    would choose is reported, and not used."""
    wanted = run.settings.profile
    device = torch.device("cuda") if wanted.for_gpu else run.device
    if wanted.lengths != "natural" and not experiment.is_ours(run.settings):
        raise UserError(f"profile.lengths={wanted.lengths} forces lengths, which only engine=torch can do")
    room = _room(run.settings, device)
    planner = Planner.of(run, device, process_alone(device))
    if run.settings.train.micro_batch_tokens == AUTO:
        fitted = fit.chosen(planner.of_updates, fit.within(room, device), {TOKENS}, f"{TOKENS}=auto")
        train = replace(run.settings.train, micro_batch_tokens=fitted.values[TOKENS])
        run = replace(run, settings=replace(run.settings, train=train))
        planner = replace(planner, run=run, step=replace(planner.step, tokens=fitted.values[TOKENS]))
    settings, measured = run.settings, None
    if not wanted.plan_only:
        with memory_explained(run):
            measured = measure(run, say, warn)
    gpu = wanted.for_gpu if isinstance(wanted.for_gpu, str) else "a GPU"
    named = torch.cuda.get_device_name(device) if run.device.type == "cuda" else f"cpu ({platform.machine()})"
    plan = planner.plan()
    phases = {
        name: {"bytes": plan.bytes_of(name), "held_by": {kind: sizes.get(kind, 0) for kind in KINDS}}
        for name, sizes in plan.phases.items()
    }
    largest_n = largest(MOST, lambda n: replace(planner, step=planner.step.with_n(n)).plan().peak <= room)
    found = {
        "command": ["grpo", "profile", *typed],
        "device": f"{gpu} of {gib(room)}" if wanted.for_gpu else named,
        "threads": torch.get_num_threads(),
        "versions": code_version(),
        "settings": asdict(settings),
        "measured": measured,
        # for rollouts of full length
        "predicted": {"phases": phases, "peak": {"phase": plan.fullest, "bytes": plan.peak}},
        "not_predicted": not_planned(run),
        "fit": {"room_bytes": room, "fits": plan.peak <= room, "largest_n": largest_n},
    }
    write_object(Path(settings.run_dir, PROFILE), found)
    show(console, found, plan)
    if settings.fit_bytes is not None:
        given, name = fit.within(room, device), f"fit={settings.fit}"
        may = fit.choosable(planner, {key_of(word) for word in typed})
        try:
            for line in fit.chosen(planner, given, may, name).lines(name, given):
                say(line)
        except UserError as error:
            say(str(error))
    return plan.peak if measured is None else int(measured["peak"]["bytes"])


def _room(settings: ProfileRunSettings, device: torch.device) -> int:
    """Return the bytes that are planned for: those of `fit`, of the named GPU, or of this machine."""
    if settings.fit_bytes is not None:
        return settings.fit_bytes
    if isinstance(settings.profile.for_gpu, str):
        return int(gpus.MEMORY[settings.profile.for_gpu])
    return total_bytes(device)
