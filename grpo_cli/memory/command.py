"""`grpo profile`: a run set up as for training, measured for a few steps, and planned from shapes."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import torch

from grpo_cli import __version__, experiment
from grpo_cli.config.auto import AUTO
from grpo_cli.config.prepare import Prepared
from grpo_cli.memory import fit, gpus
from grpo_cli.memory.explain import memory_explained
from grpo_cli.memory.findings import MOST, Findings
from grpo_cli.memory.measure import measure
from grpo_cli.memory.planner import TOKENS, Planner, largest, not_planned, process_alone
from grpo_cli.runs.files import json_line, write_atomically
from grpo_cli.runs.layout import PROFILE
from grpo_cli.settings import ProfileRunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib, parse_bytes

Say = Callable[[str], None]


def profile(run: Prepared[ProfileRunSettings], command: Sequence[str], say: Say, warn: Say) -> Findings:
    """Measure (unless `profile.plan_only`), plan, and write `profile.json`."""
    wanted = run.settings.profile
    device = torch.device("cuda") if wanted.for_gpu else run.device
    sized = run.settings.fit not in ("none", "auto")
    if wanted.lengths != "natural" and not experiment.is_ours(run.settings):
        raise UserError(f"profile.lengths={wanted.lengths} forces lengths, which only engine=torch can do")
    room = _room(run.settings, device)
    workspace, measured = process_alone(device), None
    if run.settings.train.micro_batch_tokens == AUTO:
        run = _with_tokens(run, Planner.of(run, device, workspace), fit.within(room, device))
    settings, folder = run.settings, Path(run.settings.run_dir)
    if not wanted.plan_only:
        with memory_explained(run):
            measured = measure(run, say, warn)
    planner = Planner.of(run, device, workspace)
    gpu = wanted.for_gpu if isinstance(wanted.for_gpu, str) else "a GPU"
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    findings = Findings(
        about={
            "command": list(command),
            "device": f"{gpu} of {gib(room)}" if wanted.for_gpu else _named(device),
            "threads": torch.get_num_threads(),
            "versions": {"grpo_cli": __version__, "python": platform.python_version(), **versions},
            "settings": asdict(settings),
        },
        measured=measured,
        predicted=planner.plan(),
        room=room,
        largest_n=largest(MOST, lambda n: replace(planner, step=planner.step.with_n(n)).plan().peak <= room),
        not_predicted=not_planned(run),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PROFILE, (json_line(findings.document, indent=2) + "\n").encode())
    if sized:
        _say_what_fits(planner, room, fit.typed_keys(command), say)
    return findings


def _with_tokens(run: Prepared[ProfileRunSettings], planner: Planner, room: int) -> Prepared[ProfileRunSettings]:
    values = fit.chosen(planner.of_updates, room, {TOKENS}, f"{TOKENS}=auto").values
    train = replace(run.settings.train, micro_batch_tokens=values[TOKENS])
    return replace(run, settings=replace(run.settings, train=train))


def _say_what_fits(planner: Planner, room: int, typed: Set[str], say: Say) -> None:
    """Report what `fit` would choose for this room; nothing of it is used here."""
    room, name = fit.within(room, planner.device), f"fit={planner.run.settings.fit}"
    try:
        for line in fit.chosen(planner, room, fit.choosable(planner, typed), name).lines(name, room):
            say(line)
    except UserError as error:
        say(str(error))


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def _room(settings: ProfileRunSettings, device: torch.device) -> int:
    """Return the bytes that are planned for: those of `fit`, of the named GPU, or of this machine."""
    if settings.fit not in ("none", "auto"):
        return parse_bytes(settings.fit, "fit")
    if isinstance(settings.profile.for_gpu, str):
        return int(gpus.MEMORY[settings.profile.for_gpu])
    if device.type == "cpu":
        return int(psutil.virtual_memory().total)
    if not torch.cuda.is_available():
        raise UserError("device=cuda is planned on a machine without a GPU: give its memory, as in fit=80GB")
    return int(torch.cuda.get_device_properties(device).total_memory)
