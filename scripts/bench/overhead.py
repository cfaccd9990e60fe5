"""What our own machinery costs, apart from any model.

    python scripts/bench/overhead.py downsample --json out.json
    OMP_NUM_THREADS=1 python scripts/bench/overhead.py launcher --rounds 5
    OMP_NUM_THREADS=1 python scripts/bench/overhead.py meter --rounds 8 [overrides, as of grpo profile]
    python scripts/bench/overhead.py report

downsample  choosing from a million rewards, against `numpy.sort` of the same ones: the fastest of the rounds of each,
            taken in turns. `maxvar` may cost at most 3 sorts, whatever is kept.
launcher    a further job of `grpo train -m`, over running the same by hand. Jobs do nothing; everything else is as
            ever: each job's config, its status files, its log, its process. A sweep of 1 job and one of 1 + 10 take
            turns, so that what is paid once a sweep cancels out. Processor seconds are the launcher's and the jobs'.
meter       steps with the meter of `grpo profile` on and off, in turns, in one process. Every rollout is forced to one
            length, so that both do the same work. Processor seconds, the sampling thread included.
report      `grpo report` on 100 made-up runs of 1,000 steps with all metrics in every row: at most 20 s.

Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import Check, Figures, bench_parser, clocked, finish, in_turns, medians, over, parsed, settings_of, show

from grpo_cli import experiment
from grpo_cli.config.rehearsal import build_rules
from grpo_cli.interfaces import Meter
from grpo_cli.methods.pods import max_reward_indices, max_variance_indices, percentile_indices
from grpo_cli.metrics import METRICS
from grpo_cli.profile.forced_lengths import NEVER, ProfiledEngine
from grpo_cli.profile.measure import Probe
from grpo_cli.runs.record import RunRecord, write_record
from grpo_cli.step import Step
from grpo_cli.support.meter import NullMeter
from grpo_cli.tracking.progress import Progress

# `grpo train -m` whose jobs are started as ever, but do nothing: their Python is `true`.
SWEEP = """
import shutil, sys
from grpo_cli.cli.main import main
sys.executable, sys.argv = shutil.which("true"), ["grpo", "train", "-m", *sys.argv[1:]]
main()
"""
Found = tuple[dict[str, Any], list[Check]]
RULES = {"maxvar": max_variance_indices, "maxreward": max_reward_indices, "percentile": percentile_indices}


def downsample(args: argparse.Namespace) -> Found:
    size = 10_000 if args.quick else 1_000_000
    rng = np.random.default_rng(args.seed)
    kinds = {"continuous": rng.standard_normal(size), "binary": (rng.random(size) < 0.3).astype(np.float64)}
    found: dict[str, Figures] = {}
    for kind, rewards in kinds.items():
        for kept in (16, size // 4, size // 2, size - 1):
            rules = {name: partial(rule, rewards, kept, rng) for name, rule in RULES.items()}
            arms = {name: lambda work=work: clocked(work)[1] for name, work in rules.items()}
            turns = in_turns({"sort": lambda r=rewards: clocked(lambda: np.sort(r))[1], **arms}, args.rounds)
            fastest = {name: min(turn[name]["seconds"] for turn in turns) for name in turns[0]}
            ratios = {f"{name}_ratio": fastest[name] / fastest["sort"] for name in RULES}
            found[f"{kind}, {kept} of {size}"] = {"sort_seconds": fastest["sort"], **ratios}
    columns = {"sort, s": ("sort_seconds", ".4f"), **{f"{name} / sort": (f"{name}_ratio", ".2f") for name in RULES}}
    show("choosing from many rewards", found, columns)
    worst = max(figures["maxvar_ratio"] for figures in found.values())
    return {"results": found}, [] if args.quick else [Check("maxvar over a sort, at worst", worst, most=3.0)]


def launcher(args: argparse.Namespace) -> Found:
    further = 1 if args.quick else 10
    ways = {"launcher": _by_launcher, "hand": _by_hand}
    arms = {name: lambda way=way: _per_job(way, further) for name, way in ways.items()}
    turns = in_turns(arms, args.rounds)
    found = medians(turns)
    show(f"one of {further} further jobs", found, {"seconds": ("seconds", ".3f"), "CPU-s": ("cpu_seconds", ".3f")})
    more = {name: found["launcher"][name] - found["hand"][name] for name in found["hand"]}
    print(f"over running it by hand: {more['seconds']:.3f} s, {more['cpu_seconds']:.3f} s of processor time")
    return {"results": found, "launcher_over_hand": more, "rounds": turns}, []


def _per_job(way: Callable[[int, Path], None], further: int) -> Figures:
    one, more = _cost(way, 1), _cost(way, 1 + further)
    return {name: (more[name] - one[name]) / further for name in one}


def _cost(way: Callable[[int, Path], None], jobs: int) -> Figures:
    """Wall-clock and processor seconds, the latter of all processes that it started."""
    with tempfile.TemporaryDirectory() as folder:
        before, start = os.times(), time.perf_counter()
        way(jobs, Path(folder))
        seconds, after = time.perf_counter() - start, os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": seconds, "cpu_seconds": processor}


def _by_launcher(jobs: int, cwd: Path) -> None:
    words = [f"seed=range({jobs})", "hydra.sweep.dir=sweep"]
    subprocess.run([sys.executable, "-c", SWEEP, *words], cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    done = [json.loads(path.read_text())["state"] for path in cwd.rglob("status.json")]
    assert done == ["done"] * jobs, f"{len(done)} of {jobs} jobs ran: {done}"


def _by_hand(jobs: int, cwd: Path) -> None:
    for _ in range(jobs):
        subprocess.run(["true"], check=True)


class Switch:
    """A meter that is now one, now another."""

    def __init__(self) -> None:
        self.meter: Meter = NullMeter()

    def span(self, name: str) -> AbstractContextManager[Any]:
        return self.meter.span(name)

    def take(self) -> Mapping[str, float]:
        return self.meter.take()


def meter(args: argparse.Namespace) -> Found:
    torch.set_num_threads(args.threads)
    switch = Switch()
    small = ("n=4", "train.prompts=1") if args.quick else ()
    settings = settings_of("sampling.max_new_tokens=32", *small, *args.overrides, command="profile")
    rules = build_rules(settings)
    bench = experiment.set_up(settings, settings.model, meter=switch, eos_token_ids=(NEVER,))
    bench = replace(bench, engine=ProfiledEngine(bench.engine, lambda count, longest: [longest] * count))
    parts = experiment.parts_of(settings, rules, bench, (), switch, print, print)
    step = Step(settings, parts)
    step.run(0, Progress())
    turns = in_turns({s: partial(_one_step, step, switch, s == "on") for s in ("off", "on")}, args.rounds)
    found, ratio = medians(turns), over([turn["on"] for turn in turns], [turn["off"] for turn in turns], "cpu_seconds")
    found["on"]["ratio"] = ratio
    show("a step, its meter off and on", found, {"CPU-s": ("cpu_seconds", ".3f"), "x off": ("ratio", ".3f")})
    return {"results": found, "ratio": ratio, "rounds": turns}, []


def _one_step(step: Step, switch: Switch, on: bool) -> Figures:
    if not on:
        switch.meter = NullMeter()
        return clocked(lambda: step.run(0, Progress()))[1]
    with Probe(torch.device("cpu")) as probe:
        switch.meter = probe
        time.sleep(0.5)  # its first look at the process's children, once in a run, is not of a step
        return clocked(lambda: (step.run(0, Progress()), probe.take(), probe.peaks.take()))[1]


def report(args: argparse.Namespace) -> Found:
    """Runs are 20 arms (n, downsample) with as many seeds as it takes, evaluated every 20 steps."""
    runs, steps = (10, 40) if args.quick else (100, 1000)
    arms = [(n, rule) for n in (8, 16, 32, 64) for rule in ("maxvar", "random", "maxreward", "percentile", "all")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(runs):
            write_run(folder / "runs" / str(number), *arms[number % len(arms)], number // len(arms), steps)
        size = sum(path.stat().st_size for path in folder.rglob("metrics.jsonl"))
        command = [sys.executable, "-m", "grpo_cli", "report", str(folder / "runs"), "--out", str(folder / "report")]
        turns = [
            _cost(lambda *_: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), 0)
            for _ in range(args.rounds)
        ]
    found = {key: median(turn[key] for turn in turns) for key in turns[0]}
    columns = {"seconds": ("seconds", ".1f"), "CPU-s": ("cpu_seconds", ".1f"), "MiB": ("mib", ".0f")}
    show("grpo report", {f"{runs} runs of {steps} steps": found | {"mib": size / 2**20}}, columns)
    return {"results": found, "metrics_bytes": size}, [Check("seconds of a report", found["seconds"], most=20.0)]


def write_run(folder: Path, n: int, rule: str, seed: int, steps: int) -> None:
    """A completed run, as `grpo train` leaves it, whose accuracy rises the faster the larger n is."""
    rng = random.Random(f"{n}/{rule}/{seed}")
    folder.mkdir(parents=True)
    config = {"n": n, "m": 8, "seed": seed, "train": {"steps": steps}, "downsample": {"_target_": f"rules.{rule}"}}
    words = (f"n={n}", f"downsample={rule}", f"seed={seed}")
    write_record(folder, RunRecord("train", words, {"downsample": rule, "sampler": "full"}, config, {}))
    seconds, rate = 0.1 * n**0.5 * rng.uniform(0.9, 1.1), n / 8 * rng.uniform(0.7, 1.3)
    everything = [name for name in METRICS if "<" not in name and not name.startswith("eval/")]
    phases = {"rollout": 0.6, "reward": 0.01, "logprobs": 0.02, "update": 0.35}
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(steps + 1):
            row: dict[str, float] = {"step": step}
            if step:
                row |= {name: rng.random() for name in everything}
                row |= {f"time/{name}": share * seconds for name, share in phases.items()}
                row |= {"time/step": seconds, "clock/train_seconds": step * seconds}
                row |= {"tokens/generated": 400.0 * n * step, "tokens/trained": 3200.0 * step}
                row |= {"memory/peak_bytes": (400 + 2 * n + rng.random()) * 2**20}
            if step % 20 == 0 or step == steps:
                accuracy = min(1.0, max(0.0, 0.95 - 0.55 * 2.0 ** (-rate * step / steps) + rng.gauss(0, 0.01)))
                row |= {"eval/accuracy": accuracy, "eval/accuracy_low": accuracy - 0.05}
                row |= {"eval/accuracy_high": accuracy + 0.05}
            file.write(json.dumps(row) + "\n")
    summary = {"status": "completed", "error": None, "step": steps, "train_seconds": steps * seconds}
    (folder / "summary.json").write_text(json.dumps(summary))


WHAT: Mapping[str, tuple[Callable[[argparse.Namespace], Found], int]] = {
    "downsample": (downsample, 9),
    "launcher": (launcher, 5),
    "meter": (meter, 8),
    "report": (report, 1),
}


def main(words: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, rounds=0)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("overrides", nargs="*", help="of meter")
    args = parsed(parser, words, rounds=1)
    measure, rounds = WHAT[args.what]
    args.rounds = args.rounds or rounds
    return finish(args, *measure(args))


if __name__ == "__main__":
    sys.exit(main())
