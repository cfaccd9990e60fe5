"""A study of training: arms times seeds, as its YAML file beside this one lists them.

    scripts/reproduce.sh pods                                       # every arm and seed; installs the extra `plot`
    scripts/reproduce.sh pods --seeds 0 --steps 20 --arms grpo_ga maxvar --parts default

Runs go through the pool of `grpo train -m`: a fixed number at a time, each with a fixed number of threads, in an order
that spreads every arm over the whole study, so that a machine that slows down slows all arms. A finished run is never
made again: the same command continues an interrupted study. What the runs came to goes to results.json in the study's
folder (the pages' tables are made of it by scripts/claims.py), and `grpo report` draws them.

Accuracy is that of samples at temperature 1 on held-out problems; evaluation is not on the clock. Keys of the YAML:

parts        by name: `words` of all its arms, `arms` by name with their words, and a `baseline`, as arm or part/arm.
             Runs of a part with a baseline end once they have generated as many tokens as the baseline of their seed,
             or after `longest` times its steps; `token_share` is at which share of its tokens an arm's accuracy first
             is the baseline's last; `at_equal_seconds` its accuracy after as many seconds as the shortest run of its
             seed trained
sooner_than  arms to compare times with: how long such an arm takes to 99 % of its own best accuracy, over how long
             another one takes to that accuracy, seed by seed
evaluated    ways in which each arm's policy is evaluated by `grpo eval` afterwards, by arm; `all` for the others. A way
             is a cache, or a name of `ways` with its words
means        metrics whose mean over the steps is reported
series       metrics of which the mean of every ten steps is, in those that have them
measured     what no training run can tell, by name: the module beside this one whose function of that name does

A word such as cache=rkv_20+4 stands for an eviction policy with so many keys and so many steps between two evictions;
rkv_24_whole_after_2 evicts prompts as well, once a reply has 2 tokens. Words in braces are variables (`--set`);
{butlast} is how many steps a run has but one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from common import ROOT, document, parsed, parser, positive, rotated, settings_of, write

from grpo_cli.config.overrides import overrides
from grpo_cli.report import read
from grpo_cli.report.curves import CLOCK, GREEDY, Curve, Rows, curve_of
from grpo_cli.sweep.board import Board
from grpo_cli.sweep.gpus import places
from grpo_cli.sweep.pool import Pool
from grpo_cli.sweep.status import Job, JobState, is_done, is_running, read_status, write_status

HERE = Path(__file__).resolve().parent
STUDIES = sorted(file.stem for file in HERE.glob("*.yaml"))
ACCURACY = "eval/pass@1"
# Only files; and no checkpoints but the first and the last, so that none falls between two timed steps.
ENDS = ("train.checkpoint_every=1000000", "train.keep_checkpoints=1")
QUIET = ("device=cpu", "logger=jsonl", "record.rollouts=0", *ENDS)
SUMMED = ("train_seconds", "peak_memory_bytes", "generated_tokens", "trained_tokens")  # of a run's summary


@dataclass(frozen=True)
class Run:
    """One training run: where it belongs and the words that it is started with."""

    part: str
    arm: str
    seed: int
    name: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    words: Sequence[str]
    arms: Mapping[str, Sequence[str]]
    baseline: str = ""  # part/arm
    longest: int = 4


@dataclass(frozen=True)
class Plan:
    """What a YAML file says. `levels` of the results: seeds; arms and seeds; parts, arms and seeds. `key`: where in the
    JSON they go. `needs`: a model, data."""

    name: str
    about: str
    parts: Mapping[str, Part]
    quick: Mapping[str, Any]
    steps: int | None = None
    seeds: Sequence[int] = (0, 1, 2)
    words: Sequence[str] = ()
    means: Sequence[str] = ()
    series: Sequence[str] = ()
    sooner_than: Sequence[str] = ()
    evaluated: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ways: Mapping[str, Sequence[str]] = field(default_factory=dict)
    measured: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    needs: Sequence[str] = ()
    levels: int = 3
    key: str = "results"

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(arm for part in self.parts.values() for arm in part.arms))


def plan_of(name: str) -> Plan:
    found = yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8"))
    parts = {part: Part(**{"words": [], **of}) for part, of in found.pop("parts").items()}
    return Plan(name=name, parts=parts, **found)


# What is asked


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    words = sys.argv[1:] if words is None else words
    if not words or words[0] not in STUDIES:
        raise SystemExit(f"name a study: {', '.join(STUDIES)}")
    plan = plan_of(words[0])
    made = parser(f"{plan.about}\n    scripts/reproduce.sh {plan.name}", threads=1)
    made.add_argument("--seeds", type=int, nargs="+", default=list(plan.seeds))
    made.add_argument("--steps", type=positive, default=plan.steps, help="of every run; default: %(default)s, as named")
    made.add_argument("--jobs", type=positive, default=2, help="runs at a time")
    parts = [*plan.parts, *plan.measured]
    made.add_argument("--parts", nargs="+", choices=parts, default=parts)
    made.add_argument("--arms", nargs="+", choices=plan.arms, default=plan.arms)
    made.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help=f"of {', '.join(plan.variables)}")
    made.add_argument("--out", type=Path, help="default: outputs/reproduce_<study>")
    if "model" in plan.needs:
        made.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2", help="of scripts/get_smollm2.sh")
    if "data" in plan.needs:
        made.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    args = parsed(made, words[1:], **{"seeds": plan.seeds[:1], "steps": 2} | dict(plan.quick))
    args.plan = plan
    butlast = {} if args.steps is None else {"butlast": args.steps - 1}
    args.variables = butlast | dict(plan.variables) | dict(word.split("=", 1) for word in args.set)
    return args


def check_needs(args: argparse.Namespace) -> None:
    """SystemExit where what a study of a real model needs is not there. Its paths become words of runs."""
    if "model" in args.plan.needs:
        check_model(args.model)
        args.model = args.variables["model"] = args.model.resolve()
    if "data" in args.plan.needs:
        check_data(args.data)
        args.data = args.data.resolve()


def check_model(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise SystemExit(f"{folder} holds no model: make it with scripts/get_smollm2.sh {folder}, or give --model")


def check_data(file: Path) -> None:
    if not file.is_file():
        raise SystemExit(f"{file} is no file: give --data, GSM8K's train.jsonl (openai/grade-school-math)")


def folder(args: argparse.Namespace) -> Path:
    return (args.out or Path(f"outputs/reproduce_{args.plan.name}{'_quick' * args.quick}")).resolve()


# Runs


def cache_words(name: str) -> tuple[str, ...]:
    """Of `rkv_20+4`, `dense`, `rkv_24_whole_after_2+4`: see above."""
    cache, _, buffer = name.partition("+")
    found = re.fullmatch(r"([a-z0-9]+)_(\d+)(_whole)?(?:_after_(\d+))?", cache)
    if found is None:
        return (f"sparsity={cache}",)
    policy, budget, whole, after = found[1], int(found[2]), found[3], found[4]
    window = int(after or (budget // 2 if policy == "h2o" else min(8, budget // 2)))
    values = {"budget": budget, "buffer": buffer or max(1, budget // 4), "window": window}
    values["protect_prompt"] = str(not whole).lower()
    return (f"sparsity={policy}", *(f"sparsity.{key}={value}" for key, value in values.items()))


def expanded(words: Sequence[str], variables: Mapping[str, Any]) -> tuple[str, ...]:
    """Words with their variables and caches put in."""
    given = [word.format_map(variables) if re.search(r"{[a-z]+}", word) else word for word in words]
    return tuple(one for w in given for one in (cache_words(w[6:]) if w.startswith("cache=") else (w,)))


def run_of(args: argparse.Namespace, part: str, arm: str, seed: int, *more: str) -> Run:
    plan, of = args.plan, args.plan.parts[part]
    steps = () if args.steps is None else (f"train.steps={args.steps}",)
    asked = expanded((*plan.words, *of.words, *of.arms[arm]), args.variables)
    words = dict.fromkeys((*asked, f"seed={seed}", *steps, *more, *QUIET))
    words = tuple({word.partition("=")[0]: word for word in words}.values())  # the last of each key
    at = [part] if plan.levels == 3 else []
    return Run(part, arm, seed, "/".join([*at, *arm.replace("=", "").split(), f"seed{seed}"]), words)


def baseline_of(args: argparse.Namespace, part: str) -> tuple[str, str]:
    """Part and arm; the arm is empty where runs of `part` end by themselves."""
    found = args.plan.parts[part].baseline
    return (part, found) if "/" not in found else tuple(found.split("/"))  # type: ignore[return-value]


def baselines(args: argparse.Namespace) -> list[Run]:
    named = dict.fromkeys(baseline_of(args, part) for part in args.plan.parts if part in args.parts)
    return [run_of(args, part, arm, seed) for part, arm in named if arm for seed in args.seeds]


def others(args: argparse.Namespace, out: Path) -> list[Run]:
    """All runs but the baselines, each round beginning one arm later: every arm comes at every time of the study."""
    spent = {(r.part, r.arm, r.seed): int(read_rows(r, out)[-1]["tokens/generated"]) for r in baselines(args)}
    arms = [(p, a) for p, part in args.plan.parts.items() if p in args.parts for a in part.arms if a in args.arms]
    arms = [(part, arm) for part, arm in arms if (part, arm) != baseline_of(args, part)]

    def run(part: str, arm: str, seed: int) -> Run:
        if not args.plan.parts[part].baseline:
            return run_of(args, part, arm, seed)
        steps = args.plan.parts[part].longest * args.steps
        tokens = spent[(*baseline_of(args, part), seed)]
        return run_of(args, part, arm, seed, f"train.steps={steps}", f"train.max_generated={tokens}")

    return [run(*arm, seed) for turn, seed in enumerate(args.seeds) for arm in (rotated(arms, turn) if arms else arms)]


def run_all(command: str, words: Mapping[str, Sequence[str]], out: Path, args: argparse.Namespace) -> None:
    """`grpo <command> <words>` into the folder `out`/<name> for every name that is not done yet, as jobs of a sweep.

    What an interrupted run has left is removed, since its clock was stopped. SystemExit for a folder that holds other
    words or is still written to, and at the end if a job has failed.
    """
    jobs = [Job(i, out / name, tuple(given), name) for i, (name, given) in enumerate(words.items())]
    left = [job for job in jobs if not is_there(job)]
    if jobs:
        print(f"{len(jobs) - len(left)} of {len(jobs)} of grpo {command} are done already in {out}", flush=True)
    for job in left:
        shutil.rmtree(job.folder, ignore_errors=True)
        write_status(job.folder, JobState("waiting", None, job.overrides, command=command))

    def command_of(job: Job) -> list[str]:
        folder = overrides({"hydra.run.dir": str(job.folder)})
        return [sys.executable, "-P", "-m", "grpo_cli", command, *job.overrides, *folder]

    threads = {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
    own = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))
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


def is_there(job: Job) -> bool:
    """Whether the run is complete. One of other words in its place is an error: nothing is overwritten."""
    status = read_status(job.folder)
    if status is not None and status.overrides != job.overrides:
        raise SystemExit(f"{job.folder} holds a run with other settings: give another --out, or remove it")
    if is_running(job.folder):
        raise SystemExit(f"{job.folder} is still running: wait for it, or stop it")
    return is_done(job.folder)


# What they came to


def read_rows(run: Run, out: Path) -> Rows:
    """The records of a run; what of them cannot be read is said."""
    rows, notes = read.read_rows(out / run.name / "metrics.jsonl")
    for note in notes:
        print(f"{run.name}: {note}", flush=True)
    return rows


def sampled(rows: Rows) -> Curve:
    return curve_of(rows, ACCURACY)


def _mean(rows: Rows, name: str) -> float:
    """Over the steps that made rollouts, of what speaks of these; else over all, where what a record lacks is 0."""
    of_rollouts = name.startswith(("reward/", "group/", "response/", "turns/"))
    return statistics.mean([row.get(name, 0.0) for row in rows if name in row or not of_rollouts] or [0.0])


def by_tens(rows: Rows, name: str) -> list[float | None]:
    """The mean over steps 1 to 10, 11 to 20, and so on, of those that have the metric; None where none of ten has."""
    blocks: dict[int, list[float]] = {}
    for row in rows:
        blocks.setdefault((int(row["step"]) - 1) // 10, []).extend([row[name]] if name in row else [])
    return [statistics.mean(found) if found else None for found in blocks.values()]


def of_run(rows: Rows, means: Sequence[str], series: Sequence[str] = ()) -> dict[str, Any]:
    """What one run came to by itself."""
    curve, greedy, trained = sampled(rows), curve_of(rows, GREEDY).accuracy, [row for row in rows if row["step"]]
    last, seconds = trained[-1], sum(row["time/step"] for row in trained)
    tokens = last["tokens/generated"]
    mixed = sum(row.get("group/mixed", 0) for row in trained)
    shares = [(row.get("group/mixed", 0), 1 - row.get("group/zero_std", 1)) for row in trained]
    groups = sum(number / share for number, share in shares if share)
    found = {
        "start_greedy": greedy[0],
        "final_greedy": greedy[-1],
        "steps": len(trained),
        "tokens": tokens,
        **{name: last[name] for name in ("clock/train_seconds", "tokens/generated", "tokens/trained")},
        **{name: _mean(trained, name) for name in means},
        **({"series": {name: by_tens(trained, name) for name in series}} if series else {}),
        "mixed_per_million": 1e6 * mixed / tokens,
        "mixed_share": mixed / groups if groups else 0.0,
        "seconds_per_step": statistics.median(row["time/step"] for row in trained),
        "rollout_share": sum(row.get("time/rollout", 0.0) for row in trained) / seconds,
        "update_share": sum(row["time/update"] + row.get("time/logprobs", 0.0) for row in trained) / seconds,
    }
    if curve.accuracy:
        ends = {"final_accuracy": curve.accuracy[-1], "best_accuracy": max(curve.accuracy)}
        found |= ends | {"lowest": min(curve.accuracy[1:]), "rise": curve.accuracy[-1] - curve.accuracy[0]}
    return found


def token_share(rows: Rows, base: Rows) -> float | None:
    """At which share of the baseline's tokens a run's accuracy first is the baseline's last; None if it never is."""
    reached = sampled(rows).first_reaching(sampled(base).accuracy[-1], "tokens/generated")
    return None if reached is None else reached / float(base[-1]["tokens/generated"])


def equal_seconds(runs: Sequence[Rows]) -> float:
    """How long the shortest of some runs trained."""
    return min(float(rows[-1][CLOCK]) for rows in runs)


def accuracy_after(rows: Rows, seconds: float) -> float:
    """Accuracy of samples after so many seconds of training, between evaluations on a straight line."""
    curve = sampled(rows)
    return float(np.interp(seconds, curve.along(CLOCK), curve.accuracy))


def sooner_than(baseline: Mapping[int, Curve], arm: Mapping[int, Curve]) -> dict[str, Any]:
    """How many times sooner than the baseline an arm reaches 99 % of the baseline's best accuracy, seed by seed.

    `ratios` are those of the seeds that reach it, `never` counts the others. Seeds whose baseline has learnt nothing
    (it is at its best before the first step) belong to neither.
    """
    ratios, never = list[float](), 0
    for seed in sorted(baseline.keys() & arm.keys()):
        target = 0.99 * max(baseline[seed].accuracy)
        its, mine = baseline[seed].first_reaching(target), arm[seed].first_reaching(target)
        if its and mine:
            ratios.append(its / mine)
        never += bool(its) and mine is None
    return {"ratios": ratios, "never": never}


def results(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """By part, arm and seed; where times are compared, of each arm also the ratios and the curves."""
    plan, found = args.plan, dict[str, Any]()
    base, runs = baselines(args), [*baselines(args), *others(args, out)]
    rows = {run.name: read_rows(run, out) for run in runs}
    for part in (part for part in plan.parts if part in args.parts):
        its = {run.seed: run for run in base if (run.part, run.arm) == baseline_of(args, part)}
        arms: dict[str, dict[int, Rows]] = {}
        for run in [*its.values(), *(run for run in runs if run.part == part)]:
            arms.setdefault(run.arm, {})[run.seed] = rows[run.name]
        found[part] = {arm: _of_arm(args, out, arm, of, arms) for arm, of in arms.items()}
        for arm, seed in ((arm, seed) for arm, of in arms.items() for seed in its.keys() & of.keys()):
            share = token_share(arms[arm][seed], rows[its[seed].name])
            found[part][arm][seed]["token_share"] = share
        for seed in its:
            at = equal_seconds([of[seed] for of in arms.values() if seed in of])
            for arm, of in arms.items():
                if seed in of and sampled(of[seed]).accuracy:
                    found[part][arm][seed]["at_equal_seconds"] = accuracy_after(of[seed], at)
    if plan.levels == 3:
        return found
    (found,) = found.values()
    return next(iter(found.values())) if plan.levels == 1 else found


def _of_arm(args: argparse.Namespace, out: Path, arm: str, of: Any, arms: Mapping[str, Any]) -> dict[Any, Any]:
    runs = {seed: of_run(rows, args.plan.means, args.plan.series) for seed, rows in of.items()}
    if not args.plan.sooner_than:
        return runs
    curves = {name: {seed: sampled(rows) for seed, rows in its.items()} for name, its in arms.items()}
    bases = [base for base in args.plan.sooner_than if base in arms and base != arm]
    return {
        "runs": runs,
        "sooner_than": {base: sooner_than(curves[base], curves[arm]) for base in bases},
        "curves": {seed: asdict(curve) for seed, curve in curves[arm].items()},
    }


def evaluations(args: argparse.Namespace, out: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Held-out accuracy of each run's policy, by the run and by the way it is evaluated."""
    few, words = ("eval.problems=20",) if args.quick else (), dict[str, tuple[str, ...]]()
    runs = {run.name: run.arm for run in [*baselines(args), *others(args, out)]}
    ways = {name: args.plan.evaluated.get(arm, args.plan.evaluated["all"]) for name, arm in runs.items()}
    for name, of in ways.items():
        for way in of:
            own = args.plan.ways.get(way) or expanded((f"cache={way}+{{buffer}}",), args.variables)
            given = [word.lstrip("+") for word in overrides({"checkpoint": str(out / name)})]
            words[f"evaluations/{name}/{way}"] = (*given, "eval.problems={problems}", "eval.k=4", *few, *own)
    words = {name: expanded(of, args.variables) for name, of in words.items()}
    run_all("eval", words, out, args)
    kept = (GREEDY, ACCURACY, "eval/length_mean", "engine/kv_saving_mean")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, of in ways.items():
        read = {way: json.loads((out / "evaluations" / name / way / "summary.json").read_text()) for way in of}
        found[name] = {way: {key: its.get(key, 0.0) for key in kept} for way, its in read.items()}
    return found


def with_summaries(args: argparse.Namespace, out: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Of the default run also what its summary says, and how many problems it is evaluated on."""
    for run in others(args, out):
        summary = json.loads((out / run.name / "summary.json").read_text(encoding="utf-8"))
        found[run.seed] |= {key: summary[key] for key in SUMMED}
    return {"problems": settings_of().eval.problems, "results": found}


def main(words: Sequence[str] | None = None) -> int:
    args = options(words)
    check_needs(args)
    out, plan = folder(args), args.plan
    found: dict[str, Any] = {}
    for name, module in plan.measured.items():
        if name in args.parts:
            found[name] = getattr(importlib.import_module(module), name)(args, out)
    if set(args.parts) & plan.parts.keys():
        run_all("train", {run.name: run.words for run in baselines(args)}, out, args)
        run_all("train", {run.name: run.words for run in others(args, out)}, out, args)
        came = results(args, out)
        nested = plan.levels == 3 and plan.measured  # what is measured then is one of the parts
        found = {plan.key: found | came} if nested else found | {plan.key: came}
        found = with_summaries(args, out, came) if plan.levels == 1 else found
        found |= {"evaluations": evaluations(args, out)} if plan.evaluated else {}
        subprocess.run([sys.executable, "-m", "grpo_cli", "report", str(out), "--out", str(out / "report")])
    told = document(args)
    told["settings"] = {key: value for key, value in told["settings"].items() if key not in ("plan", "variables")}
    for path in filter(None, (out / "results.json", args.json)):
        write(path, {**told, **found})
    print(f"figures: {out / 'results.json'}; pictures: {out / 'report'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
