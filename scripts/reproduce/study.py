"""What the studies of training share: runs through the pool of `grpo train -m`, and how much sooner an accuracy is met.

A study is arms times seeds. A fixed number of runs is made at a time, each with a fixed number of threads, in an order
that spreads every arm over the whole study, so that a machine that slows down slows all arms. A finished run is never
made again, so an interrupted study is continued by its command. Its folder is one that `grpo report` reads as well.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from common import Check, document, parser, positive, rotated, told, write
from common import parsed as parsed

from grpo_cli.config.overrides import overrides
from grpo_cli.report import plots, read
from grpo_cli.report.curves import AXES, CLOCK, GREEDY, Curve, Rows, curve_of
from grpo_cli.sweep.board import Board
from grpo_cli.sweep.gpus import places
from grpo_cli.sweep.pool import Pool
from grpo_cli.sweep.status import Job, Status, is_done, is_running, read_status, write_status

# What a curve shows: the share of right answers among samples at temperature 1, which is what is trained. Greedy
# accuracy is soon near its ceiling on the embedded task, and moves in steps of one problem.
ACCURACY = "eval/pass@1"

# Only files; and no checkpoints but the first and the last, so that none falls between two timed steps.
QUIET = (
    *("device=cpu", "logger=jsonl", "record.rollouts=0"),
    *("train.checkpoint_every=1000000", "train.keep_checkpoints=1"),
)

# Problems that come back about five times in 160 steps; the embedded model has met none of more than 8 numbers.
REVISITED_TASK = ("task.train_problems=512", "task.max_terms=10")
REVISITED = (
    *REVISITED_TASK,
    *("n=8", "m=8", "downsample=all", "train.prompts=16", "eval.every=10", "eval.problems=448", "eval.k=4"),
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
class Speedup:
    """How many times sooner than the baseline an arm reaches 99 % of the baseline's best accuracy, seed by seed.

    `ratios` are those of the seeds that reach it, `never` counts the others. Seeds whose baseline has learnt nothing
    (it is at its best before the first step) belong to neither.
    """

    ratios: tuple[float, ...]
    never: int

    def __str__(self) -> str:
        seeds = len(self.ratios) + self.never
        if not self.ratios:
            return "never" if seeds else "-"
        deviation = f" ± {statistics.stdev(self.ratios):.2f}" if len(self.ratios) > 1 else ""
        never = f" ({self.never} of {seeds} never)" if self.never else ""
        return f"{statistics.mean(self.ratios):.2f}{deviation}{never}"


def study_parser(description: str | None, steps: int | None) -> argparse.ArgumentParser:
    """The options of every study; `steps` is what a run has by default."""
    made = parser(description, threads=1)
    whose = "default: those of conf/experiment" if steps is None else f"default: {steps}"
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--steps", type=positive, default=steps, help=f"of every run; {whose}")
    made.add_argument("--jobs", type=positive, default=2, help="runs at a time")
    made.add_argument("--out", type=Path, help="default: outputs/reproduce_<study>")
    return made


def folder(args: argparse.Namespace, name: str) -> Path:
    """Of the study of this name."""
    return (args.out or Path(f"outputs/reproduce_{name}{'_quick' * args.quick}")).resolve()


def is_there(run: Run, out: Path) -> bool:
    """Whether it is complete. SystemExit where another one is in its place."""
    return _is_there(Job(0, out / run.name, run.words, run.name))


def conduct(
    args: argparse.Namespace,
    name: str,
    runs: Sequence[Run],
    report: Callable[[argparse.Namespace, Path, Sequence[Run]], None],
) -> None:
    """Train what is missing, then report; that the figures cannot be drawn is found out before anything is trained."""
    if not plots.can_draw():
        raise SystemExit("the figures need matplotlib: pip install 'grpo-cli[plot]', or use scripts/reproduce.sh")
    out = folder(args, name)
    run_all("train", {run.name: run.words for run in runs}, out, args)
    report(args, out, runs)


def in_turns(rounds: Sequence[Sequence[Run]]) -> list[Run]:
    """All runs of several rounds (one run per arm in each), each round beginning one arm later than the one before.

    Every arm so comes at every time of the study, and beside different neighbours.
    """
    return [run for turn, runs in enumerate(rounds) for run in rotated(runs, turn)]


def run_all(command: str, words: Mapping[str, Sequence[str]], out: Path, args: argparse.Namespace) -> None:
    """`grpo <command> <words>` into the folder `out`/<name> for every name that is not done yet, as jobs of a sweep.

    What an interrupted run has left is removed, since its clock was stopped. SystemExit for a folder that holds other
    words or is still written to, and at the end if a job has failed.
    """
    jobs = [Job(i, out / name, tuple(given), name) for i, (name, given) in enumerate(words.items())]
    left = [job for job in jobs if not _is_there(job)]
    print(f"{len(jobs) - len(left)} of {len(jobs)} of grpo {command} are done already in {out}", flush=True)
    for job in left:
        shutil.rmtree(job.folder, ignore_errors=True)
        write_status(job.folder, Status("waiting", None, job.overrides, command=command))

    def command_of(job: Job) -> list[str]:
        folder = overrides({"hydra.run.dir": str(job.folder)})
        return [sys.executable, "-P", "-m", "grpo_cli", command, *job.overrides, *folder]

    threads = {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
    own = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": own}  # for the rules of studies
    board = Board()
    pool = Pool([place | threads for place in places(args.jobs, [], environment)], command_of, command, board)
    board.start()
    try:
        pool.run(left)
    finally:
        board.close()
    failed = [f"{job.label}: {status.reason}" for job in jobs if (status := read_status(job.folder)) and status.reason]
    if failed or pool.stopped:
        raise SystemExit("\n".join(["the study is not complete; go on with the same command", *failed]))


def _is_there(job: Job) -> bool:
    """Whether the run is complete. One of other words in its place is an error: nothing is overwritten."""
    status = read_status(job.folder)
    if status is not None and status.overrides != job.overrides:
        raise SystemExit(f"{job.folder} holds a run with other settings: give another --out, or remove it")
    if is_running(job.folder):
        raise SystemExit(f"{job.folder} is still running: wait for it, or stop it")
    return is_done(job.folder)


def write_results(
    args: argparse.Namespace, out: Path, tables: str, found: Mapping[str, Any], checks: Sequence[Check] = ()
) -> int:
    """Tables to the screen and to `out`, with which bounds hold; all numbers, and what they depend on, as JSON there
    and where it was asked. Returns 1 if a bound is missed."""
    tables = "\n\n".join([tables, *map(str, checks)])
    print(f"\n{tables}\n\ntables, figures and the curve of every run: {out}")
    (out / "results.md").write_text(tables + "\n", encoding="utf-8")
    checked = {"checks": told(checks)} if checks else {}
    for path in filter(None, (out / "results.json", args.json)):
        write(path, {**document(args), **found, **checked})
    return int(not all(check.holds for check in checks))


def read_rows(run: Run, out: Path) -> Rows:
    """The records of a run; what of them cannot be read is said."""
    rows, notes = read.read_rows(out / run.name / "metrics.jsonl")
    for note in notes:
        print(f"{run.name}: {note}", flush=True)
    return rows


def sampled(rows: Rows) -> Curve:
    return curve_of(rows, ACCURACY)


def accuracies(rows: Rows) -> dict[str, float]:
    curve = sampled(rows)
    greedy = curve_of(rows, GREEDY).accuracy[-1]
    return {"final_accuracy": curve.accuracy[-1], "best_accuracy": max(curve.accuracy), "final_greedy": greedy}


def mean_of(rows: Rows, *names: str) -> dict[str, float]:
    """Means over the steps; what a record lacks is 0."""
    return {name: statistics.mean(row.get(name, 0.0) for row in rows if row["step"]) for name in names}


def undisturbed(runs: Mapping[int, Rows]) -> dict[int, Curve]:
    """The curves of an arm's seeds on one clock: each step takes the least that it took any of them.

    The seeds run at different times of the study, so what else the machine did then falls on few of them. Lengths
    of rollouts hardly differ between seeds at one step, and the rest of a step does not depend on the seed.
    """
    by_step = zip(*([row["time/step"] for row in rows if row["step"]] for rows in runs.values()), strict=True)
    clock = dict(enumerate(itertools.accumulate(map(min, by_step), initial=0.0)))
    found = {seed: sampled(rows) for seed, rows in runs.items()}
    return {
        seed: replace(curve, axes={**curve.axes, CLOCK: tuple(clock[step] for step in curve.steps)})
        for seed, curve in found.items()
    }


def speedup(baseline: Mapping[int, Curve], arm: Mapping[int, Curve], share: float = 0.99) -> Speedup:
    """Curves by seed to `Speedup`; every seed is compared with the baseline of that seed."""
    pairs = [(baseline[seed], arm[seed]) for seed in sorted(baseline.keys() & arm.keys())]
    ratios = [_ratio(base, mine, share) for base, mine in pairs]
    never = sum(ratio is None and _target_time(base, share) > 0 for ratio, (base, _) in zip(ratios, pairs, strict=True))
    return Speedup(tuple(ratio for ratio in ratios if ratio is not None), never)


def _target_time(baseline: Curve, share: float) -> float:
    reached = baseline.first_reaching(share * max(baseline.accuracy))
    assert reached is not None, "a curve reaches 99 % of its own best"
    return reached


def _ratio(baseline: Curve, arm: Curve, share: float) -> float | None:
    reached = arm.first_reaching(share * max(baseline.accuracy))
    return _target_time(baseline, share) / reached if reached else None


def spent(runs: Iterable[Run], out: Path) -> dict[int, int]:
    """How many tokens each of these runs, one a seed, has generated."""
    return {run.seed: int(read_rows(run, out)[-1]["tokens/generated"]) for run in runs}


def share_reaching(rows: Rows, base: Rows, axis: str = "tokens/generated", cost: int = 0) -> float | None:
    """At which share of the baseline's tokens (or of another axis) a run's accuracy first is the baseline's last; None
    if it never is. `cost` comes to what the run itself has used."""
    reached = sampled(rows).first_reaching(sampled(base).accuracy[-1], axis)
    return None if reached is None else (reached + cost) / float(base[-1][axis])


def spread(values: Iterable[float], digits: int = 3) -> str:
    """`mean ± standard deviation` over seeds, the mean alone where there is one."""
    numbers = list(values)
    shown = f"{statistics.mean(numbers):.{digits}g}"
    return f"{shown} ± {statistics.stdev(numbers):.2g}" if len(numbers) > 1 else shown


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *rows])


Column = Callable[[Sequence[Mapping[str, Any]]], str]  # what one arm's runs come to


def over_seeds(name: str) -> Column:
    return lambda runs: spread(run[name] for run in runs)


def mean(name: str, form: str = ".2g") -> Column:
    return lambda runs: format(statistics.mean(run[name] for run in runs), form)


def reaching(name: str) -> Column:
    """Of a share that some runs may never come to."""

    def column(runs: Sequence[Mapping[str, Any]]) -> str:
        there = [run[name] for run in runs if run[name] is not None]
        never = f" ({len(runs) - len(there)} of {len(runs)} never)" if len(there) < len(runs) else ""
        return (spread(there) if there else "") + never

    return column


def signs(name: str) -> Column:
    """Whether a difference has one sign in all seeds: what has not is a null result."""

    def column(runs: Sequence[Mapping[str, Any]]) -> str:
        above, below = (sum(sign * run[name] > 0 for run in runs) for sign in (1, -1))
        alike = "better" if above == len(runs) else "worse" if below == len(runs) else ""
        return f"{alike} in every seed" if alike else f"null: {above} of {len(runs)} better"

    return column


def plot(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[Curve]]],
    targets: Mapping[str, float],
    axes: Mapping[str, str] = AXES,
) -> None:
    """One row per setting, one column per axis: mean accuracy of each arm, and a band of one standard deviation.

    `targets` are accuracies by setting, drawn as dashed lines.
    """
    lines = {setting: [plots.ArmLine(arm, found) for arm, found in arms.items()] for setting, arms in panels.items()}
    with plots.paper_style():
        figure = plots.accuracy_figure(lines, axes, targets, "held-out accuracy, sampled", title)
        path.write_bytes(plots.png(figure))
