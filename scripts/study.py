"""What the studies in this folder share: runs as child processes, and how much sooner an accuracy is reached.

A study is arms times seeds. Each run is a process of its own, `python -m grpo_cli train ...`, with a fixed number of
threads; a fixed number of them run at a time, in an order that spreads every arm over the whole study, so that a
machine that slows down slows all arms. A finished run is never made again, so an interrupted study is continued by its
command.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo_cli.config.overrides import overrides
from grpo_cli.report import curves, plots, read
from grpo_cli.report.curves import AXES, CLOCK, Rows, mean_curve

ROOT = Path(__file__).resolve().parents[1]

# What a curve shows: the share of right answers among samples at temperature 1, which is what is trained. Greedy
# accuracy is soon near its ceiling on the embedded task, and moves in steps of one problem.
ACCURACY, GREEDY = "eval/pass@1", "eval/accuracy"

# Only files; and no checkpoints but the first and the last, so that none falls between two timed steps.
QUIET = (
    "device=cpu",
    "logger=jsonl",
    "record.rollouts=0",
    "train.checkpoint_every=1000000",
    "train.keep_checkpoints=1",
)


@dataclass(frozen=True)
class Run:
    """One training run: where it belongs and the words that it is started with."""

    setting: str
    arm: str
    seed: int
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.setting}/{self.arm}/seed{self.seed}"


@dataclass(frozen=True)
class Curve(curves.Curve):
    """One run's evaluations: `accuracy` is ACCURACY, and the greedy one comes along."""

    greedy: tuple[float, ...]


@dataclass(frozen=True)
class Speedup:
    """How many times sooner than the baseline an arm reaches 99 % of the baseline's best accuracy, seed by seed.

    `ratios` are those of the seeds that reach it, `never` counts the others. Seeds whose baseline has learnt nothing
    (it is at its best before the first step) belong to neither. `of_means` is the same ratio of the curves averaged
    over seeds, as the PODS authors take it.
    """

    ratios: tuple[float, ...]
    never: int
    of_means: float | None

    def __str__(self) -> str:
        seeds = len(self.ratios) + self.never
        if not self.ratios:
            return "never" if seeds else "-"
        shown = f"{statistics.mean(self.ratios):.2f}"
        if len(self.ratios) > 1:
            shown += f" ± {statistics.stdev(self.ratios):.2f}"
        return shown + (f" ({self.never} of {seeds} never)" if self.never else "")


def study_parser(description: str | None, name: str, steps: int | None) -> argparse.ArgumentParser:
    """The words that every study takes; `name` is that of its folder and files, `steps` what a run has by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    whose = "default: those of conf/experiment" if steps is None else f"default: {steps}"
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=positive, default=steps, help=f"of every run; {whose}")
    parser.add_argument("--jobs", type=positive, default=2, help="runs at a time")
    parser.add_argument("--threads", type=positive, default=1, help="of each run")
    parser.add_argument("--out", type=Path, default=Path(f"outputs/reproduce_{name}"))
    parser.add_argument("--json", type=Path, help=f"where to write the figures besides <out>/{name}.json")
    return parser


def positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is less than 1")
    return number


def conduct(
    args: argparse.Namespace,
    runs: Sequence[Run],
    report: Callable[[argparse.Namespace, Path, Sequence[Run]], None],
) -> None:
    """Train what is missing, then report; that the figures cannot be drawn is found out before anything is trained."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("the figures need matplotlib: pip install 'grpo-cli[plot]', or run the study's .sh file")
    out = args.out.resolve()
    train_all(runs, out, args.jobs, args.threads)
    report(args, out, runs)
    print(f"tables, figures and the curve of every run: {out}")


def write_results(args: argparse.Namespace, out: Path, name: str, tables: str, found: Mapping[str, Any]) -> None:
    """Tables to the screen and to `out`; all numbers, and what they depend on, as JSON there and where it was asked."""
    print(f"\n{tables}\n")
    (out / f"{name}.md").write_text(tables + "\n")
    words = {key: value for key, value in vars(args).items() if key not in ("out", "json")}
    text = json.dumps({"settings": words, "environment": environment(), **found}, indent=1) + "\n"
    for path in filter(None, (out / f"{name}.json", args.json)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def in_turns(groups: Sequence[Sequence[Run]]) -> list[Run]:
    """All runs of several rounds (one run per arm in each), each round beginning one arm later than the one before.

    Every arm so comes at every time of the study, and beside different neighbours.
    """
    return [run for i, group in enumerate(groups) for run in [*group[i % len(group) :], *group[: i % len(group)]]]


def is_finished(run: Run, out: Path) -> bool:
    """Whether the run is there and complete. A run of other words in its place is an error: nothing is overwritten."""
    folder = out / run.name
    summary, started_with = folder / "summary.json", folder / ".hydra" / "overrides.yaml"
    if started_with.is_file() and yaml.safe_load(started_with.read_text()) != list(run.words):
        raise SystemExit(f"{folder} holds a run with other settings: give another --out, or remove it")
    return summary.is_file() and json.loads(summary.read_text())["status"] == "completed"


def train(run: Run, out: Path, threads: int) -> None:
    """One run, from its beginning; what an interrupted one has left is removed, since its clock was stopped."""
    folder = out / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ended = grpo(["train", *run.words, *overrides({"hydra.run.dir": str(folder)})], folder / "log.txt", threads)
    if ended or not is_finished(run, out):
        tail = "\n".join((folder / "log.txt").read_text(errors="replace").splitlines()[-10:])
        raise SystemExit(f"{run.name} did not complete (exit code {ended}); the end of {folder / 'log.txt'}:\n{tail}")


def grpo(words: Sequence[str], log: Path, threads: int) -> int:
    """`grpo <words>` as a process of so many threads; all that it says goes to `log`. Its exit code."""
    settings = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with open(log, "wb") as said:
        command = [sys.executable, "-m", "grpo_cli", *words]
        return subprocess.run(command, cwd=ROOT, env=settings, stdout=said, stderr=subprocess.STDOUT).returncode


def train_all(
    runs: Sequence[Run], out: Path, jobs: int, threads: int, start: Callable[[Run, Path, int], None] = train
) -> None:
    """Every run that is not finished yet, `jobs` at a time; the first one that fails stops those not yet begun."""
    waiting = [run for run in runs if not is_finished(run, out)]
    print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already in {out}", flush=True)
    began = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(start, run, out, threads): run for run in waiting}
        try:
            for done, future in enumerate(as_completed(running), start=1):
                future.result()
                minutes = (time.monotonic() - began) / 60
                print(f"[{done}/{len(waiting)}] {minutes:5.1f} min  {running[future].name}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def read_rows(run: Run, out: Path) -> Rows:
    """The records of a run; what of them cannot be read is said."""
    rows, notes = read.read_rows(out / run.name / "metrics.jsonl")
    for note in notes:
        print(f"{run.name}: {note}", flush=True)
    return rows


def curve_of(rows: Rows) -> Curve:
    return Curve(**vars(curves.curve_of(rows, ACCURACY)), greedy=curves.curve_of(rows, GREEDY).accuracy)


def undisturbed(runs: Mapping[int, Rows]) -> dict[int, Curve]:
    """The curves of an arm's seeds on one clock: each step takes the least that it took any of them.

    The seeds run at different times of the study, so what else the machine did then falls on few of them. Lengths
    of rollouts hardly differ between seeds at one step, and the rest of a step does not depend on the seed.
    """
    by_step = zip(*([row["time/step"] for row in rows if row["step"]] for rows in runs.values()), strict=True)
    clock = dict(enumerate(itertools.accumulate(map(min, by_step), initial=0.0)))
    found = {seed: curve_of(rows) for seed, rows in runs.items()}
    return {
        seed: replace(curve, axes={**curve.axes, CLOCK: tuple(clock[step] for step in curve.steps)})
        for seed, curve in found.items()
    }


def speedup(baseline: Mapping[int, Curve], arm: Mapping[int, Curve], share: float = 0.99) -> Speedup:
    """Curves by seed to `Speedup`; every seed is compared with the baseline of that seed."""
    ratios, never = [], 0
    for seed in sorted(baseline.keys() & arm.keys()):
        ratio = _ratio(baseline[seed], arm[seed], share)
        if ratio is not None:
            ratios.append(ratio)
        elif _target_time(baseline[seed], share) > 0:
            never += 1
    of_means = _ratio(mean_curve(list(baseline.values())), mean_curve(list(arm.values())), share)
    return Speedup(tuple(ratios), never, of_means)


def _target_time(baseline: Curve, share: float) -> float:
    reached = baseline.first_reaching(share * max(baseline.accuracy))
    assert reached is not None, "a curve reaches 99 % of its own best"
    return reached


def _ratio(baseline: Curve, arm: Curve, share: float) -> float | None:
    reached = arm.first_reaching(share * max(baseline.accuracy))
    return _target_time(baseline, share) / reached if reached else None


def spread(values: Iterable[float], digits: int = 3) -> str:
    """`mean ± standard deviation` over seeds, the mean alone where there is one."""
    numbers = list(values)
    shown = f"{statistics.mean(numbers):.{digits}g}"
    return f"{shown} ± {statistics.stdev(numbers):.2g}" if len(numbers) > 1 else shown


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(
    path: Path, title: str, panels: Mapping[str, Mapping[str, Sequence[Curve]]], targets: Mapping[str, float]
) -> None:
    """One row per setting, one column per axis: mean accuracy of each arm, and a band of one standard deviation.

    `targets` are accuracies by setting, drawn as dashed lines.
    """
    lines = {setting: [plots.Line(arm, found) for arm, found in arms.items()] for setting, arms in panels.items()}
    with plots.paper_style():  # needs the extra `plot`
        figure = plots.accuracy_figure(lines, AXES, targets, "held-out accuracy, sampled", title)
        path.write_bytes(plots.png(figure))


def environment() -> dict[str, Any]:
    """What the figures depend on besides the settings."""
    weights = ROOT / "grpo_cli" / "model" / "tiny" / "model.safetensors"
    packages = ("grpo-cli", "torch", "transformers", "numpy", "hydra-core")
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "embedded_model_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
