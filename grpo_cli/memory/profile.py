"""`grpo profile`: a run set up as for training, measured for a few steps, and planned from shapes; a table and JSON."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from grpo_cli import experiment
from grpo_cli.config.auto import AUTO
from grpo_cli.config.overrides import key_of
from grpo_cli.config.prepare import Prepared, prepare
from grpo_cli.evaluate import evaluate_with
from grpo_cli.interfaces import Advantage, SetUp
from grpo_cli.memory import fit
from grpo_cli.memory.out_of_memory import breakdown, explaining_out_of_memory
from grpo_cli.memory.plan import UPDATE, MemoryPlan
from grpo_cli.memory.planner import AS_IT_IS, Planner, not_planned, process_size, with_values
from grpo_cli.report.tables import Table, print_table
from grpo_cli.runs.files import write_object
from grpo_cli.runs.layout import PROFILE
from grpo_cli.runs.record import code_version
from grpo_cli.settings import ProfileRunSettings
from grpo_cli.step import Step
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib
from grpo_cli.support.memory import peak_bytes, start_peak, total_bytes
from grpo_cli.support.meter import Meter
from grpo_cli.support.terminal import to_stderr
from grpo_cli.tracking.progress import Progress
from grpo_cli.types import ScoredGroup

# Bytes of the GPUs of `profile.for_gpu`, as published: less than they report, which leaves room for CUDA itself.
GPUS = {"h200": 141e9, "h100": 80e9, "a100_80gb": 80e9, "a100_40gb": 40e9, "l40s": 48e9}
GPUS |= {"l4": 24e9, "a10": 24e9, "t4": 16e9, "rtx4090": 24e9, "rtx3090": 24e9}
MOST = 1024  # rollouts per prompt: the search for the largest group that fits stops here
_COLUMNS = ("phase", "seconds", "", "share", "tokens/s", "peak", "predicted", "ratio")
# The phases of a step in order, none nested in another; `eval` is outside the step. The first is engine=ray's.
PHASES = (*("weights", "prefill", "decode", "reward", "old_logprobs", "ref_logprobs"), *UPDATE, "eval")
NEVER = -1  # the end-of-sequence token of rollouts of full length: a token that no model produces
_SLOTS = "rollouts: {decode_steps:.0f} decode steps in {slots:.0f} slots, {slot_utilisation:.0%} of them busy"


def profile(run: Prepared[ProfileRunSettings], typed: Sequence[str], console: Console) -> int:
    """Choose what `fit` would, measure unless only a plan is wanted, write `profile.json`, show it; return the peak."""
    settings, wanted = run.settings, run.settings.profile
    if wanted.lengths != "natural" and not experiment.uses_torch_engine(run.factories):
        raise UserError(f"profile.lengths={wanted.lengths} forces lengths, which only engine=torch can do")
    device = torch.device("cuda") if wanted.for_gpu else run.device
    to_stderr("planning: a few seconds")
    workspace = process_size(device)
    room = settings.fit_bytes or int(GPUS.get(str(wanted.for_gpu), 0)) or total_bytes(device)
    planner, values = Planner.of(run, device, workspace), AS_IT_IS
    if settings.fit != "none" or settings.train.micro_batch_tokens == AUTO:
        limit = fit.within(room, device)
        if settings.fit_bytes is None and not wanted.for_gpu:  # what is free, as in training
            room = limit = fit.room_of(settings, device, workspace, to_stderr)
        fitted = fit.cheapest_fit(planner, limit, {key_of(word) for word in typed})
        values = fitted.values
        to_stderr("\n".join(fitted.lines))
    settings, measured = with_values(settings, values), None
    if wanted.measures:
        run = prepare(settings)
        with explaining_out_of_memory(run):
            measured = measure(run)
    named = torch.cuda.get_device_name(device) if run.device.type == "cuda" else f"cpu ({platform.machine()})"
    plan = planner.plan(values)
    phases = {name: {"bytes": plan.bytes_of(name), "held_by": sizes} for name, sizes in plan.items()}
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
        lines.append("Time is not predicted: on the device, grpo profile without plan_only and for_gpu measures it.")
        for name, sizes in plan.items():
            held_by = ", ".join(f"{kind} {gib(size)}" for kind, size in sizes.items() if size)
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
        expected = plan.bytes_of(name) if name in plan else 0
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


def _phase(seconds: Sequence[float], tokens: int | None, peak: int) -> dict[str, Any]:
    """Return the measurements of a phase: seconds of each step, tokens of all (None where they mean nothing), peak
    bytes (0: not read)."""
    speed = tokens / sum(seconds) if tokens is not None and any(seconds) else None
    timed = {"seconds": seconds, "seconds_median": median(seconds), "tokens_per_second": speed}
    return {**timed, "tokens": tokens, "peak_bytes": peak}


def measure(run: Prepared[ProfileRunSettings]) -> dict[str, Any]:
    """Warm up and measure steps, then an evaluation; nothing is saved or logged. Return phases by name, including
    `step` and the part of it outside any phase (`rest`); the peak; the engine's figures."""
    settings, wanted = run.settings, run.settings.profile
    if wanted.lengths == "full":
        settings = replace(settings, sampling=replace(settings.sampling, stop=()))
    peaks, opened, seconds = dict[str, int](), list[str](), defaultdict[str, list[float]](list)

    def note_peak(names: Sequence[str]) -> None:
        peak = peak_bytes(run.device)  # of the spans that were open until now
        start_peak(run.device)
        peaks.update({name: max(peaks.get(name, 0), peak) for name in opened})
        opened[:] = names

    meter = Meter(run.device, note_peak)
    ends: dict[str, Any] = {"eos_token_ids": (NEVER,)} if wanted.lengths == "full" else {}
    runtime = experiment.set_up(run, settings.model, span=meter.span, **ends)
    if isinstance(rule := run.rules.advantage, SetUp):
        rule.setup(runtime)
    run = replace(run, rules=replace(run.rules, advantage=partial(_never_all_equal, rule)))
    parts = experiment.parts_of(run, runtime, meter, to_stderr, experiment.say_to_stderr)
    step, progress = Step(settings, replace(parts, warmup=None)), Progress()
    for number in range(-wanted.warmup, wanted.steps):
        if number == 0:
            peaks.clear()
            before = replace(progress)
        record = step.run(number + wanted.warmup, progress)
        times = meter.take()
        to_stderr(f"step {number + 1} of {wanted.steps}: {times['time/step']:.2f} s" if number >= 0 else "warming up")
        rest = times["time/step"] - sum(times.get(f"time/{name}", 0.0) for name in PHASES)
        for name, taken in {**times, "time/rest": rest}.items() if number >= 0 else ():
            seconds[name.removeprefix("time/")].append(taken)
    generated, trained = (getattr(progress, k) - getattr(before, k) for k in ("generated_tokens", "trained_tokens"))
    corrected = generated if run.rules.correction.rejects else trained  # before any are chosen
    tokens = {"decode": generated, "old_logprobs": corrected, "ref_logprobs": trained}
    tokens |= dict.fromkeys(("forward", "backward"), settings.train.epochs * trained)
    highest = dict(peaks)
    if wanted.eval and settings.eval.every > 0:
        with meter.span("eval"), step.learner.autocast():
            found = evaluate_with(runtime, settings)
        seconds["eval"], highest["eval"] = [meter.take()["time/eval"]], peaks["eval"]
        tokens["eval"] = found.stats.generated_tokens
    names = [name for name in (*PHASES[:-1], "rest", "step", "eval") if name in seconds]
    phases = {name: _phase(seconds[name], tokens.get(name), highest.get(name, 0)) for name in names}
    fullest = max((name for name in names if name in PHASES), key=lambda name: highest.get(name, 0))
    engine = {name: value for name, value in record.metrics.items() if name.startswith("engine/")}
    return {"phases": phases, "engine": engine, "peak": {"phase": fullest, "bytes": highest.get(fullest, 0)}}


def _never_all_equal(rule: Advantage, group: ScoredGroup, kept: Sequence[int]) -> torch.Tensor:
    """Return a group's advantages, ones where all are 0. Completions of forced length often all earn nothing, and
    without a gradient the optimizer would neither step nor allocate its state."""
    advantages = rule(group, kept)
    return advantages if advantages.any() else torch.ones_like(advantages)
