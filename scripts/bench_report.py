"""Seconds of a report on many made-up runs, each a run folder as `grpo train` leaves it, with all metrics in every row.

Runs are 20 arms (n, downsample) with as many seeds as it takes, evaluated every 20 steps. Exits with 1 when 100 runs
of 1,000 steps take 20 s or more.

    python scripts/bench_report.py outputs/bench_report.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import yaml

from grpo_cli.metrics import METRICS

BOUND = 20.0
ARMS = [(n, rule) for n in (8, 16, 32, 64) for rule in ("maxvar", "random", "maxreward", "percentile", "all")]
PHASES = {"rollout": 0.6, "reward": 0.01, "logprobs": 0.02, "update": 0.35}


def write_run(folder: Path, n: int, rule: str, seed: int, steps: int, eval_every: int = 20) -> None:
    """A completed run whose accuracy rises the faster the larger n is."""
    rng = random.Random(f"{n}/{rule}/{seed}")
    hydra = folder / ".hydra"
    hydra.mkdir(parents=True)
    config = {"n": n, "m": 8, "seed": seed, "train": {"steps": steps}, "downsample": {"_target_": f"rules.{rule}"}}
    choices = {"downsample": rule, "sampler": "full", "hydra/launcher": "basic"}
    (hydra / "config.yaml").write_text(yaml.safe_dump(config))
    (hydra / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))
    (hydra / "overrides.yaml").write_text(yaml.safe_dump([f"n={n}", f"downsample={rule}", f"seed={seed}"]))
    seconds_per_step, rate = 0.1 * n**0.5 * rng.uniform(0.9, 1.1), n / 8 * rng.uniform(0.7, 1.3)
    everything = [name for name in METRICS if "<" not in name and not name.startswith("eval/")]
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(steps + 1):
            row = {"step": step, **({name: rng.random() for name in everything} if step else {})}
            if step:
                row |= {f"time/{name}": share * seconds_per_step for name, share in PHASES.items()}
                row |= {"time/step": seconds_per_step, "clock/train_seconds": step * seconds_per_step}
                row |= {"tokens/generated": 400.0 * n * step, "tokens/trained": 3200.0 * step}
                row |= {"memory/peak_bytes": (400 + 2 * n + rng.random()) * 2**20}
            if step % eval_every == 0 or step == steps:
                share = 1 - 2.0 ** (-rate * step / steps)
                accuracy = min(1.0, max(0.0, 0.4 + 0.55 * share + rng.gauss(0, 0.01)))
                row |= {"eval/accuracy": accuracy, "eval/accuracy_low": accuracy - 0.05}
                row |= {"eval/accuracy_high": accuracy + 0.05}
            file.write(json.dumps(row) + "\n")
    summary = {"status": "completed", "error": None, "step": steps, "train_seconds": steps * seconds_per_step}
    (folder / "summary.json").write_text(json.dumps(summary))


def measure(runs: int, steps: int) -> dict[str, float]:
    """Wall-clock and processor seconds of the whole command, a process of its own, and the bytes it reads."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(runs):
            n, rule = ARMS[number % len(ARMS)]
            write_run(folder / "runs" / str(number), n, rule, number // len(ARMS), steps)
        size = sum(path.stat().st_size for path in folder.rglob("metrics.jsonl"))
        command = [sys.executable, "-m", "grpo_cli", "report", str(folder / "runs"), "--out", str(folder / "report")]
        before, start = os.times(), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds, after = time.perf_counter() - start, os.times()
        processor = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": seconds, "processor_seconds": processor, "metrics_bytes": size}


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds of a report on many made-up runs.")
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()

    found = measure(args.runs, args.steps)
    settings = {"runs": args.runs, "steps": args.steps, "pictures": find_spec("matplotlib") is not None}
    machine = {"python": platform.python_version(), "machine": platform.machine(), "load": os.getloadavg()[0]}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"settings": settings, **machine, **found}, indent=1) + "\n")
    print(
        f"{args.runs} runs of {args.steps} steps, {found['metrics_bytes'] / 2**20:.0f} MiB: {found['seconds']:.1f} s, "
        f"{found['processor_seconds']:.1f} s of processor time (load {machine['load']:.1f})"
    )
    return 1 if args.runs <= 100 and args.steps <= 1000 and found["seconds"] >= BOUND else 0


if __name__ == "__main__":
    raise SystemExit(main())
