"""What the launcher of a sweep costs per further job, over running the same jobs by hand one after the other.

    OMP_NUM_THREADS=1 python scripts/bench_launcher.py --rounds 5 scripts/baselines/bench_launcher.json

Jobs do nothing but write a summary.json; everything else is as in `grpo train -m`: composing and checking each job's
config, its status files, its log, its process. A sweep of 1 job and one of 1 + `--jobs` take turns, so that what is
paid once a sweep cancels out. Processor seconds are those of the launcher and of the jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from grpo_cli.cli import main as cli
from grpo_cli.sweep.launcher import ProcessLauncher
from grpo_cli.sweep.pool import Job

SWEEP = "--sweep"  # how the program starts itself as the one that is measured


def job_in(folder: Path) -> list[str]:
    return ["sh", "-c", """echo '{"status": "completed"}' > "$0/summary.json" """, str(folder)]


def sweep(jobs: str) -> None:
    """`grpo train -m` with so many jobs, which are started as ever, but do nothing."""

    def command_of(self: ProcessLauncher, job: Job) -> list[str]:
        return job_in(job.folder)

    ProcessLauncher._command_of = command_of  # type: ignore[method-assign]
    seeds = ",".join(map(str, range(int(jobs))))
    sys.argv = ["grpo", "train", "-m", f"seed={seeds}", "hydra.sweep.dir=sweep"]
    cli.main()


def by_launcher(jobs: int, cwd: Path) -> None:
    subprocess.run(
        [sys.executable, Path(__file__).resolve(), SWEEP, str(jobs)], cwd=cwd, check=True, capture_output=True
    )


def by_hand(jobs: int, cwd: Path) -> None:
    for number in range(jobs):
        folder = cwd / str(number)
        folder.mkdir()
        subprocess.run(job_in(folder), check=True)


def seconds_of(way: Any, jobs: int) -> tuple[float, float]:
    """Wall-clock and processor seconds, the latter of all processes that it started."""
    with tempfile.TemporaryDirectory() as folder:
        before, start = os.times(), time.perf_counter()
        way(jobs, Path(folder))
        wall, after = time.perf_counter() - start, os.times()
        done = list(Path(folder).rglob("summary.json"))
    assert len(done) == jobs, f"{len(done)} of {jobs} jobs ran"
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def per_job(one: Sequence[float], all_of_them: Sequence[float], further: int) -> tuple[float, float]:
    """Wall-clock and processor seconds of a further job."""
    return (all_of_them[0] - one[0]) / further, (all_of_them[1] - one[1]) / further


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=10, help="further jobs, after the first")
    args = parser.parse_args()
    ways = {"launcher": by_launcher, "hand": by_hand}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    loads = [os.getloadavg()[0]]
    for _ in range(args.rounds):
        for name, way in ways.items():
            found[name].append(per_job(seconds_of(way, 1), seconds_of(way, 1 + args.jobs), args.jobs))
    loads.append(os.getloadavg()[0])
    medians = {name: [median(column) for column in zip(*rounds, strict=True)] for name, rounds in found.items()}
    wall, processor = (launcher - hand for launcher, hand in zip(medians["launcher"], medians["hand"], strict=True))
    print(f"per further job, over running it by hand: {wall:.3f} s, {processor:.3f} s of processor time (load {loads})")
    if args.json:
        settings = {"rounds": args.rounds, "further_jobs": args.jobs, "threads": os.environ.get("OMP_NUM_THREADS")}
        machine = {"python": platform.python_version(), "machine": platform.machine(), "loads": loads}
        rounds = {name: [{"wall": w, "processor": p} for w, p in pairs] for name, pairs in found.items()}
        result = {"wall_seconds_per_job": wall, "processor_seconds_per_job": processor, "rounds": rounds}
        args.json.write_text(json.dumps({"settings": settings, **machine, **result}, indent=1) + "\n")


if __name__ == "__main__":
    sweep(sys.argv[2]) if sys.argv[1:2] == [SWEEP] else main()
