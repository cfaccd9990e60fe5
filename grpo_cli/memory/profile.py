"""`grpo profile`: a run set up as for training, measured for a few steps, and planned from shapes; a table and JSON."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from grpo_cli import experiment
from grpo_cli.config.auto import AUTO
from grpo_cli.config.overrides import key_of
from grpo_cli.config.prepare import Prepared, prepare
from grpo_cli.memory import fit
from grpo_cli.memory.measure import measure
from grpo_cli.memory.out_of_memory import breakdown, explaining_out_of_memory
from grpo_cli.memory.plan import KINDS, MemoryPlan
from grpo_cli.memory.planner import AS_IT_IS, Planner, not_planned, process_size, with_values
from grpo_cli.report.tables import Table, print_table
from grpo_cli.runs.files import write_object
from grpo_cli.runs.layout import PROFILE
from grpo_cli.runs.record import code_version
from grpo_cli.settings import ProfileRunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib
from grpo_cli.support.memory import free_bytes, total_bytes

Say = Callable[[str], None]
# Bytes of the GPUs of `profile.for_gpu`, as published: less than they report, which leaves room for CUDA itself.
GPUS = {"h200": 141e9, "h100": 80e9, "a100_80gb": 80e9, "a100_40gb": 40e9, "l40s": 48e9}
GPUS |= {"l4": 24e9, "a10": 24e9, "t4": 16e9, "rtx4090": 24e9, "rtx3090": 24e9}
MOST = 1024  # rollouts per prompt: the search for the largest group that fits stops here
_COLUMNS = ("phase", "seconds", "", "share", "tokens/s", "peak", "predicted", "ratio")
_SLOTS = "rollouts: {decode_steps:.0f} decode steps in {slots:.0f} slots, {slot_utilisation:.0%} of them busy"


def profile(run: Prepared[ProfileRunSettings], typed: Sequence[str], say: Say, warn: Say, console: Console) -> int:
    """Choose what `fit` would, measure unless only a plan is wanted, write `profile.json`, show it; return the peak."""
    settings, wanted = run.settings, run.settings.profile
    if wanted.lengths != "natural" and not experiment.uses_torch_engine(run.factories):
        raise UserError(f"profile.lengths={wanted.lengths} forces lengths, which only engine=torch can do")
    device = torch.device("cuda") if wanted.for_gpu else run.device
    say("planning: a few seconds")
    workspace = process_size(device)
    if not (room := settings.fit_bytes or int(GPUS.get(str(wanted.for_gpu), 0))):
        room = free_bytes(device) + workspace if settings.fit == "auto" else total_bytes(device)
    planner, values = Planner.of(run, device, workspace), AS_IT_IS
    if settings.fit != "none" or settings.train.micro_batch_tokens == AUTO:
        fitted = fit.cheapest_fit(planner, fit.within(room, device), {key_of(word) for word in typed})
        values = fitted.values
        say("\n".join(fitted.lines))
    settings, measured = with_values(settings, values), None
    if wanted.measures:
        run = prepare(settings)
        with explaining_out_of_memory(run):
            measured = measure(run, say, warn)
    named = torch.cuda.get_device_name(device) if run.device.type == "cuda" else f"cpu ({platform.machine()})"
    plan = planner.plan(values)
    held = {name: {kind: sizes.get(kind, 0) for kind in KINDS} for name, sizes in plan.phases.items()}
    phases = {name: {"bytes": plan.bytes_of(name), "held_by": sizes} for name, sizes in held.items()}
    largest_n = fit.largest(MOST, lambda n: replace(planner, step=planner.step.with_n(n)).plan(values).peak <= room)
    found = {
        "command": ["grpo", "profile", *typed],
        "device": f"{wanted.for_gpu} of {gib(room)}" if wanted.for_gpu else named,
        "threads": torch.get_num_threads(),
        "versions": code_version(),
        "settings": asdict(settings),
        "measured": measured,
        # for rollouts of full length
        "predicted": {"phases": phases, "peak": {"phase": plan.fullest, "bytes": plan.peak}},
        "not_predicted": not_planned(run),
        "fit": {"room_bytes": room, "fits": plan.peak <= room, "largest_n": largest_n, "chosen": dict(values)},
    }
    write_object(Path(settings.run_dir, PROFILE), found)
    _show(console, found, plan, breakdown(planner, values))
    return plan.peak if measured is None else int(measured["peak"]["bytes"])


def _show(console: Console, found: Mapping[str, Any], plan: MemoryPlan, held: Sequence[str]) -> None:
    """Print the phases, what the fullest has `held`, and what fits."""
    lines, fits = [f"Not planned: {note}." for note in found["not_predicted"]], found["fit"]
    if (measured := found["measured"]) is None:
        lines.append("Not planned: time. On the device itself, grpo profile without plan_only and for_gpu measures it.")
        for name, sizes in plan.phases.items():
            held_by = ", ".join(f"{kind} {gib(sizes[kind])}" for kind in KINDS if sizes.get(kind))
            lines.append(f"{name:12} {gib(plan.bytes_of(name)):>10}: {held_by}")
    else:
        print_table(console, _phases(measured["phases"], plan))
        figures = {name.removeprefix("engine/"): value for name, value in measured["engine"].items()}
        lines.append(f"{_SLOTS.format(**figures)}; KV cache {gib(figures['kv_peak_bytes'])}")
    verdict = f"{gib(plan.peak)} {'fits' if fits['fits'] else 'does not fit'} in {gib(fits['room_bytes'])}"
    largest = f"{fits['largest_n']}{' or more' if fits['largest_n'] == MOST else ''}"
    for line in (*lines, *held, f"{verdict}; the largest n that fits: {largest}."):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _phases(measured: Mapping[str, Any], plan: MemoryPlan) -> Table:
    step, rows = measured["step"]["seconds_median"], list[tuple[str, ...]]()
    for name, phase in measured.items():
        seconds, middle, peak = phase["seconds"], phase["seconds_median"], phase["peak_bytes"]
        expected = plan.bytes_of(name) if name in plan.phases else 0
        row = (
            name,
            f"{middle:.3f}",
            f"± {(max(seconds) - min(seconds)) / 2:.3f}" if len(seconds) > 1 else "",
            "" if name == "eval" else f"{middle / step:.0%}",
            f"{phase['tokens_per_second']:,.0f}" if phase["tokens_per_second"] else "",
            gib(peak) if peak else "",
            gib(expected) if expected else "",
            f"{expected / peak:.2f}" if expected and peak else "",
        )
        rows.append(row)
    title = "a step, phase by phase (median and half the range of the measured steps)"
    return Table(_COLUMNS, tuple(rows), frozenset(_COLUMNS[1:]), list(measured).index("step"), title)
