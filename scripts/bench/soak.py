"""Whether a long run stays as it began: 10,000 tiny steps of `grpo train` in one process.

    OMP_NUM_THREADS=1 python scripts/bench/soak.py --json scripts/baselines/soak.json

The embedded model, two prompts, four rollouts of at most eight tokens each, no evaluation, a checkpoint every tenth of
the steps; the learning rate is too small to change what there is to do. The last tenth of the steps is compared with
the second: resident memory may grow by 1 %, and a step's processor time by 10 %; open files and threads have to be as
many. Each step is measured against a yardstick, fixed work that is done after it, since what else the machine does
slows down both. Figures are medians. Linux only. Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import Check, Figures, finish, parsed, parser, positive, settings_of, show

from grpo_cli.experiment import build
from grpo_cli.types import Record

WORDS = ("n=4", "train.prompts=2", "sampling.max_new_tokens=8", "eval.every=0", "optim.lr=1e-9", "device=cpu")
YARDSTICK = 50_000  # square roots: some milliseconds
COLUMNS = {
    "s/step": ("seconds", ".4f"),
    "CPU-s/step": ("cpu_seconds", ".4f"),
    "yardsticks": ("yardsticks", ".1f"),
    "MiB": ("mib", ".1f"),
    "files": ("files", ".0f"),
    "threads": ("threads", ".0f"),
}


class Watch:
    """A logger that notes after each step what the process takes."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / "soak.json"
        self._seen = array("d")  # a list of lists would be most of what grows

    def log(self, record: Record) -> None:
        wall, processor = time.perf_counter(), time.process_time()
        sum(math.sqrt(number) for number in range(YARDSTICK))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        counts = (len(os.listdir(f"/proc/self/{of}")) for of in ("fd", "task"))
        mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        self._seen.extend((wall, processor, time.process_time(), mib, *counts))

    def close(self, summary: Mapping[str, Any]) -> None:
        rows = zip(*[iter(self._seen)] * 6, strict=True)
        self._file.write_text(json.dumps([*rows]))


def soak(args: argparse.Namespace) -> dict[str, Figures]:
    """What each tenth of the steps took."""
    torch.set_num_threads(args.threads)
    tenth = args.steps // 10
    with tempfile.TemporaryDirectory() as folder:
        length = (f"train.steps={10 * tenth}", f"train.checkpoint_every={tenth}", f"seed={args.seed}")
        words = (*WORDS, *length, f"run_dir={folder}", "logger=jsonl", "logger._target_=soak.Watch")
        build(settings_of(*words)).fit()
        seen = json.loads((Path(folder) / "soak.json").read_text())
    return {f"to step {end}": _figures(seen[end - tenth : end + 1]) for end in range(tenth, 10 * tenth + 1, tenth)}


def _figures(seen: Sequence[Sequence[float]]) -> Figures:
    """Of neighbouring steps: medians, but of files and threads the most. The first is where the others begin."""
    clock, before, after, mib, files, threads = zip(*seen, strict=True)
    seconds = [b - a for a, b in zip(clock, clock[1:], strict=False)]
    cpu = [b - a for a, b in zip(after, before[1:], strict=False)]
    yardsticks = [work / (b - a) for work, a, b in zip(cpu, before[1:], after[1:], strict=True)]
    figures = {"seconds": median(seconds), "cpu_seconds": median(cpu), "yardsticks": median(yardsticks)}
    return figures | {"mib": median(mib[1:]), "files": max(files[1:]), "threads": max(threads[1:])}


def main(words: Sequence[str] | None = None) -> int:
    made = parser(__doc__, threads=1)
    made.add_argument("--steps", type=positive, default=10_000, help="a multiple of 10")
    made.add_argument("--seed", type=int, default=0)
    args = parsed(made, words, steps=40)
    found = soak(args)
    show(f"{args.steps} steps", found, COLUMNS)
    _, second, *_, last = found.values()
    ratios = {name: last[name] / second[name] for name in second}
    checks = [
        Check("memory at the end over that of the second tenth", ratios["mib"], most=1.01),
        Check("yardsticks of a step at the end over those in the second tenth", ratios["yardsticks"], most=1.1),
        Check("open files more than in the second tenth", last["files"] - second["files"], most=0),
        Check("threads more than in the second tenth", last["threads"] - second["threads"], most=0),
    ]
    return finish(args, {"results": found, "last_over_second": ratios}, [] if args.quick else checks)


if __name__ == "__main__":
    sys.exit(main())
