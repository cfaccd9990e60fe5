"""Reused tokens without collapse: partial rollouts, replay, corrections of old tokens, and a belt for the rate.

    scripts/reproduce.sh frontier_b
    scripts/reproduce.sh frontier_b --parts cost learning --seeds 1

The embedded model on 512 sums and differences of 2 to 10 numbers, as in frontier_a. `cost`: decode steps per trained
group for every sampler, with lengths that are given and no training. `learning`: partial rollouts with what corrects
them or does not; `replay`: half of every step's groups are earlier ones. Runs of both end once they have generated as
many tokens as the baseline of their seed, or, to bound the time, after four times its steps; `to the baseline's end` is
at which share of its tokens (or steps, which are updates) an arm's held-out pass@1 first is the baseline's last, which
the baseline itself may be before its end. `belt`: four times the rate and three quarters of every step replayed, for
as many steps as the baseline has; `belt_twice` and `belt_usual` the same at twice the rate and at the usual one, at
which new rollouts alone do not fall (the baseline), so that what falls there falls by what is old.

Parts may be made one by one; a last call for all of them makes nothing again and reports all. About two hours and a
half on two cores with `--jobs 2`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import partial_cost
import study
from common import Check, Figures, positive
from study import Column, Rows, Run, mean, over_seeds, reaching, sampled, signs

from grpo_cli.report import plots

SETTING = "reused"
BASELINE = "epochs"
STEPS = 80
LONGEST = 4  # times as many steps as the baseline's
PARTIAL = ("collector=partial", "collector.surplus=1.0")
FIFO = ("replay=fifo", "replay.fresh=0.5")
FASTER, TWICE = ("optim.lr=2e-3",), ("optim.lr=1e-3",)  # four times and twice conf/train.yaml's
OLD = ("replay=fifo", "replay.fresh=0.25")
BELT = (*FASTER, *OLD)
YOUNG = "replay.max_lag=4"
ESS, DECOUPLED = "optim.ess=sqrt", "correction=decoupled"
ARMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "learning": {
        "partial": PARTIAL,
        "partial tis": (*PARTIAL, "correction=tis"),
        "partial tis ess": (*PARTIAL, "correction=tis", ESS),
        "partial fresh": (*PARTIAL, "credit=fresh"),
        "partial drawn": (*PARTIAL, "correction.prox=drawn"),
    },
    "replay": {
        "fifo": FIFO,
        "fifo decoupled": (*FIFO, DECOUPLED),
        "fifo decoupled ess": (*FIFO, DECOUPLED, ESS),
        "fifo young ess": (*FIFO, YOUNG, DECOUPLED, ESS),
        "fifo less ess": ("replay=fifo", "replay.fresh=0.75", DECOUPLED, ESS),
    },
    "belt": {
        "faster": FASTER,
        "faster fifo": BELT,
        "faster fifo ess": (*BELT, ESS),
        "faster fifo decoupled": (*BELT, DECOUPLED),
        "faster fifo decoupled ess": (*BELT, DECOUPLED, ESS),
        "faster linear ess": (*BELT, DECOUPLED, "optim.ess=linear"),
        "faster young ess": (*BELT, YOUNG, DECOUPLED, ESS),
    },
    "belt_twice": {
        "twice": TWICE,
        "twice fifo": (*TWICE, *OLD),
        "twice fifo ess": (*TWICE, *OLD, ESS),
        "twice fifo decoupled": (*TWICE, *OLD, DECOUPLED),
        "twice fifo decoupled ess": (*TWICE, *OLD, DECOUPLED, ESS),
    },
    "belt_usual": {
        "usual fifo": OLD,
        "usual fifo ess": (*OLD, ESS),
        "usual fifo decoupled": (*OLD, DECOUPLED),
        "usual fifo decoupled ess": (*OLD, DECOUPLED, ESS),
    },
}
ALL = {BASELINE: tuple[str, ...](), **{arm: words for of in ARMS.values() for arm, words in of.items()}}
WITH_BASELINE = ("learning", "replay")  # the parts whose runs end with its tokens
BELTS = ("belt", "belt_twice", "belt_usual")


def _shown(values: Sequence[float]) -> str:
    return format(statistics.mean(values), ".2f") if values else ""


COMMON: dict[str, Column] = {
    "pass@1 at the end": over_seeds("final_accuracy"),
    "than the baseline": lambda runs: signs("gain")(runs) if any(run["gain"] for run in runs) else "",
    "best": over_seeds("best_accuracy"),
    "tokens to the baseline's end": reaching("token_share"),
    "steps to the baseline's end": reaching("step_share"),
    "at the baseline's steps": over_seeds("accuracy_by_then"),
    "old tokens": mean("off/token_share", ".0%"),
    "mean lag": mean("off/lag_mean", ".2f"),
    "decode steps per step": mean("engine/decode_steps", ".1f"),
    "steps": mean("steps", ".0f"),
    "tokens": mean("tokens", ",.0f"),
}
FROM_THE_START: dict[str, Column] = {
    "start": over_seeds("start"),
    "lowest": over_seeds("lowest"),
    "pass@1 at the end": over_seeds("final_accuracy"),
    "than the start": signs("rise"),
    "runs that end below it": lambda runs: f"{sum(run['rise'] < 0 for run in runs)} of {len(runs)}",
    "best": over_seeds("best_accuracy"),
    "effective sample size": lambda runs: _shown([run["ess"] for run in runs if run["ess"] is not None]),
    "rate": mean("optim/lr", ".2g"),
    "old tokens": mean("off/token_share", ".0%"),
    "mean lag": mean("off/lag_mean", ".2f"),
}
COLUMNS: Mapping[str, dict[str, Column]] = {
    **dict.fromkeys(WITH_BASELINE, COMMON),
    **dict.fromkeys(BELTS, FROM_THE_START),
}
MEANS = ("off/token_share", "off/lag_mean", "optim/lr", "engine/decode_steps")
AXES = {"tokens/generated": "generated tokens", "step": "steps"}


def run_of(arm: str, seed: int, *more: str) -> Run:
    words = (*study.REVISITED, *ALL[arm], f"seed={seed}", *more, *study.QUIET)
    return Run(SETTING, arm.replace(" ", "_"), seed, words)


def baselines(args: argparse.Namespace) -> list[Run]:
    """None for parts that compare with no other run."""
    wanted = set(args.parts) & set(WITH_BASELINE)
    return [run_of(BASELINE, seed, f"train.steps={args.steps}") for seed in args.seeds] if wanted else []


def arms_of(part: str, args: argparse.Namespace) -> list[str]:
    return [arm for arm in ARMS.get(part, ()) if part in args.parts and arm in args.arms]


def others(args: argparse.Namespace, out: Path) -> dict[str, list[Run]]:
    """All but the baselines, by part."""
    spent = study.spent(baselines(args), out)

    def run(part: str, arm: str, seed: int) -> Run:
        if part not in WITH_BASELINE:
            return run_of(arm, seed, f"train.steps={args.steps}")
        end = (f"train.steps={LONGEST * args.steps}", f"train.max_generated={spent[seed]}")
        return run_of(arm, seed, *end)

    return {
        part: study.in_turns([[run(part, arm, seed) for arm in arms_of(part, args)] for seed in args.seeds])
        for part in ARMS
        if arms_of(part, args)
    }


def of_run(rows: Rows) -> dict[str, Any]:
    """What one run came to by itself."""
    curve, trained = sampled(rows), [row for row in rows if row["step"]]
    start, *later = curve.accuracy
    shares = [row["off/ess"] for row in trained if "off/ess" in row]  # of steps with anything old
    return {
        **study.accuracies(rows),
        **study.mean_of(rows, *MEANS),
        "ess": statistics.mean(shares) if shares else None,
        "start": start,
        "lowest": min(later),
        "rise": curve.accuracy[-1] - start,
        "steps": len(trained),
        "tokens": trained[-1]["tokens/generated"],
    }


def beside(rows: Rows, base: Rows) -> dict[str, Any]:
    """What it came to beside the baseline of its seed."""
    curve, theirs = sampled(rows), sampled(base)
    by_then = [y for step, y in zip(curve.steps, curve.accuracy, strict=True) if step <= theirs.steps[-1]]
    return {
        "gain": curve.accuracy[-1] - theirs.accuracy[-1],
        "token_share": study.share_reaching(rows, base),
        "step_share": study.share_reaching(rows, base, "step"),
        "accuracy_by_then": by_then[-1],
    }


def most_by(shares: Sequence[float | None], wanted: float) -> float:
    """The share at which so many of the runs have arrived, as a part of all; infinite where too few ever do."""
    ordered = sorted(math.inf if share is None else share for share in shares)
    return ordered[math.ceil(wanted * len(ordered)) - 1]


def checks(found: Mapping[str, Mapping[str, Mapping[int, Mapping[str, Any]]]]) -> list[Check]:
    """What was wanted of parts, arms and seeds."""
    made = []
    for arm, runs in found.get("replay", {}).items():
        if arm != BASELINE:
            share = most_by([run["token_share"] for run in runs.values()], 2 / 3)
            words = f"replay: {arm}: share of the baseline's tokens by which two of three seeds are at its end"
            made.append(Check(words, share, most=0.6))
    for part in BELTS:
        for arm, runs in found.get(part, {}).items():
            if arm.endswith(" ess"):
                words = f"{part}: {arm}: the least that a run has risen above its start"
                made.append(Check(words, min(run["rise"] for run in runs.values()), least=0))
    return made


def said_of_the_belt(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    """Whether there was a collapse for the belt to hold."""
    fallen = [arm for arm, runs in found.items() if any(run["rise"] < 0 for run in runs.values())]
    if all(arm.endswith(" ess") for arm in fallen):
        return "Null: no run without optim.ess ends below its start, so that there was no collapse to prevent."
    return f"Runs end below their start in: {', '.join(fallen)}."


def report(args: argparse.Namespace, out: Path, costs: Mapping[str, Mapping[str, Figures]]) -> int:
    """Tables to the screen; tables, figures and JSON to `out`. Returns 1 if a bound is missed."""
    base = {run.seed: study.read_rows(run, out) for run in baselines(args)}
    texts, found, wanted = list[str](), dict[str, Any](), list[Check]()
    if costs:
        found["cost"] = costs
        texts.append(f"cost\n\n{partial_cost.table(costs)}")
        wanted += partial_cost.checks(costs)
        partial_cost.draw(out / "cost.png", costs)
    trained: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for part, runs in others(args, out).items():
        rows: dict[str, dict[int, Rows]] = {BASELINE: base} if part in WITH_BASELINE else {}
        for arm in arms_of(part, args):
            name = run_of(arm, 0).arm
            rows[arm] = {run.seed: study.read_rows(run, out) for run in runs if run.arm == name}
        trained[part] = {
            arm: {seed: of_run(r) | (beside(r, base[seed]) if part in WITH_BASELINE else {}) for seed, r in of.items()}
            for arm, of in rows.items()
        }
        columns = COLUMNS[part]
        lines = [
            [arm, *(column(list(of.values())) for column in columns.values())] for arm, of in trained[part].items()
        ]
        texts.append(f"{part}\n\n{study.markdown(['arm', *columns], lines)}")
        if part in BELTS:
            texts.append(said_of_the_belt(trained[part]))
        draw(args, part, rows, base, out)
    if not args.quick:  # too few steps to learn anything
        wanted += checks(trained)
    return study.write_results(args, out, "\n\n".join(texts), {"results": found | trained}, wanted)


def draw(
    args: argparse.Namespace, part: str, rows: Mapping[str, Mapping[int, Rows]], base: Mapping[int, Rows], out: Path
) -> None:
    level = base if part in WITH_BASELINE else next(iter(rows.values()))
    place = -1 if part in WITH_BASELINE else 0
    target = statistics.mean(sampled(r).accuracy[place] for r in level.values())
    dashed = "the baseline's end" if part in WITH_BASELINE else "the start"
    panels = {part: {arm: [sampled(r) for r in of.values()] for arm, of in rows.items()}}
    title = f"{len(args.seeds)} seed(s): mean and deviation; dashed: {dashed}"
    study.plot(out / f"{part}.png", title, panels, {part: target}, AXES)


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    made = study.study_parser(__doc__, STEPS)
    made.add_argument("--parts", nargs="+", choices=["cost", *ARMS], default=["cost", *ARMS])
    made.add_argument("--arms", nargs="+", choices=list(ALL), default=list(ALL), help="of the parts that train")
    made.add_argument("--samplers", nargs="+", choices=partial_cost.SAMPLERS, default=list(partial_cost.SAMPLERS))
    made.add_argument("--cost-steps", type=positive, default=50, help="of every arm of cost")
    made.set_defaults(seeds=[1, 2, 3])
    few = ["partial tis ess", "partial drawn", "fifo decoupled ess", "faster", "faster fifo decoupled ess"]
    return study.parsed(made, words, seeds=[1], steps=2, samplers=["full"], cost_steps=2, arms=few)


def main(words: Sequence[str] | None = None) -> int:
    args = options(words)
    if not plots.can_draw():
        raise SystemExit("the figures need matplotlib: pip install 'grpo-cli[plot]', or use scripts/reproduce.sh")
    out = study.folder(args, "frontier_b")
    costs = partial_cost.all_of(args, out) if "cost" in args.parts else {}
    study.run_all("train", {run.name: run.words for run in baselines(args)}, out, args)
    study.run_all("train", {run.name: run.words for of in others(args, out).values() for run in of}, out, args)
    return report(args, out, costs)


if __name__ == "__main__":
    sys.exit(main())
