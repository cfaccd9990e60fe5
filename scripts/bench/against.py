"""Whether this checkout is slower than an earlier commit: both run the same commands in turns, and each pair of runs
gives a ratio (this over that), of which the table shows the geometric mean and its 95 % interval.

    python scripts/bench/against.py <commit> --json out.json
    python scripts/bench/against.py <commit> --model models/smollm2 --only 'real step' --rounds 5

Besides, this checkout's embedded step with several threads, in turns with its own with one.

Steps and rollouts are means of what a run logs of its steps from the third on, in seconds of the clock. A plan, a
start (one step of training, nothing learnt) and `--help` are processor seconds of the whole process, which other
programs on the machine disturb less.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, Figures, Turn, bench_parser, finish, in_turns, parsed, show

from grpo_cli.support.intervals import student_95

QUIET = ("eval.every=0", "logger=jsonl", "record.rollouts=0")
PLAN = ("model=qwen2_5_3b", "n=64", "m=16", "sampler=infinite", "sampler.slots=16", "fit=80GB")
REAL = ("model=hf", "task=word_problems", "n=16", "train.prompts=2", "sampling.max_new_tokens=64", "optim.lr=1e-9")

MORE = (2, 3, 8)


def run(tree: Path, threads: int, *words: str) -> float:
    """`grpo <words>` of a checkout; its processor seconds. RuntimeError with its last words if it fails."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment["MKL_DYNAMIC"] = "FALSE"  # or PyTorch computes with no more threads than there are cores
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-P", "-m", "grpo_cli", *words]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{tree.name}: grpo {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def steps(tree: Path, threads: int, count: int, *words: str) -> Figures:
    """Return the mean seconds of a step, and of its parts, which then sum up."""
    with tempfile.TemporaryDirectory() as place:
        run(tree, threads, "train", f"train.steps={count}", *QUIET, *words, f"hydra.run.dir={place}/run")
        lines = (Path(place) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step" in row][2:]
    parts = ("step", "rollout", "update")
    return {part: statistics.mean(row[f"time/{part}"] for row in rows) for part in parts}


def seconds(tree: Path, threads: int, *words: str) -> Figures:
    """Processor seconds of a whole process."""
    with tempfile.TemporaryDirectory() as place:
        folder = [] if words[-1] == "--help" else [f"hydra.run.dir={place}/run"]
        return {"process": run(tree, threads, *words, *folder)}


def jobs(options: Any) -> Mapping[str, Callable[[Path], Figures]]:
    """What is measured, by name."""
    found: dict[str, Callable[[Path], Figures]] = {}
    for threads in options.with_threads:
        found[f"embedded step, threads={threads}"] = lambda tree, t=threads: steps(tree, t, options.steps)
    if options.model is not None:
        real = (*REAL, f"model.path={options.model.resolve()}")
        found["real step"] = lambda tree: steps(tree, options.threads, 4, *real)
    found["plan"] = lambda tree: seconds(tree, 1, "profile", "profile.plan_only=true", *PLAN)
    found["start"] = lambda tree: seconds(tree, 1, "train", "train.steps=1", *QUIET)
    found["help"] = lambda tree: seconds(tree, 1, "--help")
    return {name: job for name, job in found.items() if options.only in name}


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A commit in a folder of its own, for as long as this lasts."""
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / commit
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def ratios(turns: list[Turn], part: str) -> Figures:
    """Geometric mean of this over that, and the ends of its 95 % interval, of logarithms of pairs."""
    logs = [math.log(turn["this"][part] / turn["that"][part]) for turn in turns]
    mean = statistics.mean(logs)
    half = student_95(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return {
        "ratio": math.exp(mean),
        "low": math.exp(mean - half),
        "high": math.exp(mean + half) if half < 700 else math.inf,
        "this": statistics.median(turn["this"][part] for turn in turns),
        "that": statistics.median(turn["that"][part] for turn in turns),
    }


def main(words: Sequence[str] | None = None) -> int:
    made = bench_parser(__doc__, rounds=4)
    made.add_argument("commit", help="the earlier one")
    made.add_argument("--with-threads", type=int, nargs="+", default=[1, 2], help="of the embedded steps")
    made.add_argument("--steps", type=int, default=12, help="of the embedded runs")
    made.add_argument("--model", type=Path, help="folder of a real model, for the real step")
    made.add_argument("--only", default="", help="only measure what has this in its name")
    args = parsed(made, words, rounds=1, steps=4)
    found: dict[str, Any] = {}
    with checkout(args.commit) as that:
        for name, job in jobs(args).items():
            turns = in_turns({"this": lambda job=job: job(ROOT), "that": lambda job=job: job(that)}, args.rounds)
            for part in turns[0]["this"]:
                found[name if part in ("step", "process") else f"{name}: {part}"] = ratios(turns, part)
    for threads in MORE:
        name = f"embedded step, threads={threads} over one"
        if args.only in name:
            arms = {"this": threads, "that": 1}
            turns = in_turns({arm: partial(steps, ROOT, count, args.steps) for arm, count in arms.items()}, args.rounds)
            found[name] = ratios(turns, "step")
    columns = {"this / that": ("ratio", ".3f"), "from": ("low", ".3f"), "to": ("high", ".3f")}
    columns |= {"this, s": ("this", ".3f"), "that, s": ("that", ".3f")}
    show(f"this checkout over {args.commit}, {args.rounds} pairs", found, columns)
    return finish(args, {"ratios": found})


if __name__ == "__main__":
    raise SystemExit(main())
