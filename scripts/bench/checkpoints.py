"""How long training waits for its checkpoints, with train.checkpoint=now and lazy, at train.checkpoint_every=1.

    python scripts/bench/checkpoints.py tiny
    python scripts/bench/checkpoints.py smollm2 --json scripts/baselines/bench_checkpoints.json

tiny     the embedded model on task=arithmetic
smollm2  the 135 M model on word problems, every weight trained: 1.6 GB for each checkpoint

Every arm is a run of `grpo train` in a process of its own, in turns. Of the records of all steps but the first, after
which there is a state of the optimizer: the mean of time/checkpoint (what training waited for the save before), of
time/checkpoint_write (what the thread took meanwhile), and of time/step; then the whole run's seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import ROOT, Check, Figures, bench_parser, finish, in_turns, medians, over, parsed, show

COMMON = ("train.checkpoint_every=1", "eval.every=0", "logger=jsonl", "device=cpu")
RUNS = {
    "tiny": ("n=16", "train.prompts=16", "train.steps=8"),
    "smollm2": (
        *("model=smollm2_135m", "model.path=models/smollm2", "task=word_problems", "n=8", "train.prompts=1"),
        *("sampling.max_new_tokens=32", "train.micro_batch_tokens=1024", "train.steps=4"),
    ),
}
COLUMNS = {
    "waited for a checkpoint, s": ("checkpoint", ".3g"),
    "written meanwhile, s": ("checkpoint_write", ".3g"),
    "step, s": ("step", ".3g"),
    "run, s": ("run", ".3g"),
}


def run(words: Sequence[str], kind: str) -> Figures:
    with tempfile.TemporaryDirectory(dir=ROOT) as place:
        folder = Path(place) / "run"
        command = [*(sys.executable, "-m", "grpo_cli", "train"), *COMMON, *words, f"train.checkpoint={kind}"]
        start = time.perf_counter()
        subprocess.run([*command, f"hydra.run.dir={folder}"], check=True, capture_output=True, cwd=ROOT)
        seconds = time.perf_counter() - start
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][2:]
    names = ("checkpoint", "checkpoint_write", "step")
    found = {name: statistics.mean(row.get(f"time/{name}", 0.0) for row in rows) for name in names}
    return {**found, "run": seconds}


def main(words: Sequence[str] | None = None) -> int:
    made = bench_parser(__doc__, rounds=2, threads=1)
    made.add_argument("models", nargs="+", choices=sorted(RUNS))
    args: argparse.Namespace = parsed(made, words, rounds=1)
    found, checks = {}, []
    for name in args.models:
        arms = {kind: lambda kind=kind, name=name: run(RUNS[name], kind) for kind in ("now", "lazy")}
        turns = in_turns(arms, args.rounds)
        found[name] = medians(turns)
        share = over([turn["lazy"] for turn in turns], [turn["now"] for turn in turns], "checkpoint")
        most = {"most": 0.1} if name == "smollm2" else {}
        checks.append(Check(f"{name}: waited with lazy, over now", share, **most))
        show(name, found[name], COLUMNS)
    return finish(args, {"found": found}, checks)


if __name__ == "__main__":
    raise SystemExit(main())
