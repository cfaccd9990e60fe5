"""What `grpo profile` predicts of memory, against what it measures: one profile per case, each in a process of its own.

    OMP_NUM_THREADS=1 python scripts/bench/memory.py --json scripts/baselines/bench_memory.json
    OMP_NUM_THREADS=1 python scripts/bench/memory.py --cases default '50 M'

On a CPU the peak is the resident memory of the process. Rollouts are those of a seed and of full length, so a profile
differs little from run to run. No bound: the ratios are the result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common import Figures, finish, parsed, parser, show

SMALL = ("n=8", "train.prompts=4", "eval.problems=20", "profile.lengths=full")
SHAPE = {
    **{"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 32000},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
}
LARGER = ("model=qwen3_1_7b", "model.random_init=true", *(f"model.architecture.{k}={v}" for k, v in SHAPE.items()))
CASES: dict[str, tuple[str, ...]] = {
    "default": ("profile.lengths=full",),
    "50 M": (*SMALL, *LARGER),
}


def ratios(words: Sequence[str], threads: int) -> Figures:
    """Predicted over measured peak."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "grpo_cli", "profile", "logger=jsonl", "device=cpu", *words]
        done = subprocess.run(
            [*command, f"hydra.run.dir={folder}"],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"grpo profile {' '.join(words)}: {done.stderr.strip()}")
        found = json.loads((Path(folder) / "profile.json").read_text(encoding="utf-8"))
    peak = found["measured"]["peak"]["bytes"]
    return {"peak_bytes": peak, "peak_ratio": found["predicted"]["peak"]["bytes"] / peak}


def main(words: Sequence[str] | None = None) -> int:
    made = parser(__doc__, threads=1)
    made.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args: argparse.Namespace = parsed(made, words, cases=["default"])
    quick = ("profile.steps=1", "profile.warmup=0", "eval.every=0") if args.quick else ()
    found = {case: ratios((*CASES[case], *quick), args.threads) for case in args.cases}
    columns = {"peak, bytes": ("peak_bytes", ",.0f"), "peak ratio": ("peak_ratio", ".3f")}
    show("predicted over measured", found, columns)
    return finish(args, {"words": CASES, "results": found})


if __name__ == "__main__":
    sys.exit(main())
