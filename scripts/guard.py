"""Six short runs, one for each corner of the line, and what they came to: to show that a change moves no result.

    python scripts/guard.py                      runs them here, and compares with scripts/baselines/guard.json
    python scripts/guard.py --write FILE         runs them here, and writes what they came to
    python scripts/guard.py --against COMMIT     runs them here and in a checkout of that commit, and compares the two

Compared are metrics.jsonl without times, rates and memory, and the SHA-256 of the last weights. Bits differ from one
processor to another (README, Limits), so the file holds for the processor that it names; elsewhere use --against.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "bench"))
from common import ROOT, lasting, processor

BASELINE = ROOT / "scripts" / "baselines" / "guard.json"
SHORT = ["logger=jsonl", "train.steps=4", "train.checkpoint_every=2", "eval.every=2", "eval.problems=20", "eval.k=2"]
RUNS = {
    "default": [],
    "maxvar": ["n=12", "m=5", "downsample=maxvar"],
    "infinite": ["sampler=infinite", "sampler.slots=24", "scheduler=lpt", "predictor=prefix"],
    "sparse": ["sparsity=rkv", "correction=sparse_rl", "sparsity.budget=24", "sparsity.buffer=8"],
    "dapo": ["loss=dapo", "train.epochs=2", "train.minibatches=2"],
    "lora": ["model.lora.rank=4"],
}


def come_to(tree: Path, words: list[str]) -> dict[str, Any]:
    """One run of the checkout `tree`: its metrics by step, and its weights' hash by file."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        command = [sys.executable, "-m", "grpo_cli", "train", *SHORT, *words, f"hydra.run.dir={folder}"]
        env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return lasting(folder)


def all_runs(tree: Path) -> dict[str, Any]:
    found = {}
    for name, words in RUNS.items():
        found[name] = come_to(tree, words)
        print(f"{tree.name}: {name}: {next(iter(found[name]['weights'].values()))[:12]}", flush=True)
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What a person has to look at, one line each; metrics that only one side has are told by name."""
    told = []
    for name in RUNS:
        old, new = before[name], after[name]
        if old["weights"] != new["weights"]:
            told.append(f"{name}: the weights differ")
        for row, other in zip(old["metrics"], new["metrics"], strict=True):
            for metric in sorted(row.keys() | other.keys()):
                if row.get(metric) != other.get(metric):
                    told.append(f"{name}: step {row['step']}: {metric}: {row.get(metric)} -> {other.get(metric)}")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", metavar="COMMIT")
    options = parser.parse_args()
    if options.write:
        found = {"processor": processor()["processor"], "runs": all_runs(ROOT)}
        options.write.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    if options.against:
        with tempfile.TemporaryDirectory() as place:
            tree = Path(place) / "before"
            subprocess.run(["git", "worktree", "add", "--detach", tree, options.against], cwd=ROOT, check=True)
            try:
                before = all_runs(tree)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    else:
        stored = json.loads(BASELINE.read_text(encoding="utf-8"))
        if stored["processor"] != processor()["processor"]:
            raise SystemExit(f"the stored runs are of another processor ({stored['processor']}): use --against COMMIT")
        before = stored["runs"]
    told = differences(before, all_runs(ROOT))
    print("\n".join(told) if told else "all six runs agree")
    raise SystemExit(bool(told))


if __name__ == "__main__":
    main()
