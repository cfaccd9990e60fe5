"""Which problems, and how often: curricula, collectors and small groups at equal generated tokens.

    scripts/reproduce.sh frontier_a
    scripts/reproduce.sh frontier_a --seeds 1 --arms dps target mixed

The embedded model on 512 sums and differences of 2 to 10 numbers, which come back about five times in a run of 160
steps; it has met none of more than 8. The baseline asks 16 problems 8 times a step, each problem once an epoch. Every
other run ends once it has generated as many tokens as the baseline of its seed; what a profile costs is counted.
`tokens to the baseline's end` is at which share of its tokens an arm's held-out pass@1 first is the baseline's last.
`mixed` are groups whose rewards differ, which alone teach. `dr_grpo` is the baseline of `dars`, which needs that
advantage. The small groups have as many rollouts a step as all others.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import study
from common import settings_of
from study import Column, Rows, Run, mean, over_seeds, reaching, sampled

from grpo_cli.report import plots
from grpo_cli.runs.checkpoint import load_state
from grpo_cli.runs.find import find_checkpoint

SETTING = "revisited"
BASELINE, PROFILED = "epochs", "profile"
STEPS = 160
FIGURES = ("ways.png", "small_groups.png")
LONGEST = 20  # times as many steps as the baseline's, which an arm with short answers may need for its tokens
WAYS: Mapping[str, tuple[str, ...]] = {
    BASELINE: (),
    "dps": ("curriculum=dps",),
    "target": ("curriculum=target",),
    "mixed": ("collector=mixed", "collector.pool=3"),
    PROFILED: ("curriculum=profile", "collector=profile"),
    "dr_grpo": ("advantage=dr_grpo",),
    "dars": ("collector=dars", "advantage=dr_grpo"),
}
SMALL = {
    f"{advantage} n={n}": (f"n={n}", f"m={n}", f"train.prompts={round(128 / n)}", f"advantage={advantage}")
    for n, advantages in {2: ("rloo",), 3: ("rloo", "grpo", "median"), 9: ("grpo", "median")}.items()
    for advantage in advantages
}
ARMS = {**WAYS, **SMALL}
COLUMNS: dict[str, Column] = {
    "pass@1 at the end": over_seeds("final_accuracy"),
    "best": over_seeds("best_accuracy"),
    "tokens to the baseline's end": reaching("share"),
    "mixed groups per 1M tokens": mean("mixed_per_million", ",.0f"),
    "share of groups that are mixed": mean("mixed_share", ".0%"),
    "problems met": mean("distinct", ",.0f"),
    "steps": mean("steps", ".0f"),
    "tokens": mean("tokens", ",.0f"),
}


def run_of(arm: str, seed: int, args: argparse.Namespace, *more: str) -> Run:
    name = arm.replace(" ", "_").replace("=", "")
    return Run(SETTING, name, seed, (*study.REVISITED, *ARMS[arm], f"seed={seed}", *more, *study.QUIET))


def baselines(args: argparse.Namespace) -> list[Run]:
    return [run_of(BASELINE, seed, args, f"train.steps={args.steps}") for seed in args.seeds]


def profiles(args: argparse.Namespace, out: Path) -> dict[str, tuple[str, ...]]:
    """The pass over all problems that comes before training, by seed."""
    words = ("eval.split=train", "eval.problems=-1", "eval.k=8", "logger=jsonl", "device=cpu")
    return {f"profile/seed{seed}": (*study.REVISITED_TASK, *words, f"seed={seed}") for seed in args.seeds}


def profile_of(seed: int, out: Path) -> tuple[Path, int]:
    """Its file, and how many tokens it took; the greedy answers are no part of it."""
    file = out / "profile" / f"seed{seed}" / "samples.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return file, sum(row["length"] for row in rows if row["reason"] == "sampled")


def mean_size(file: Path) -> float:
    """Of a group in a run with this profile, over its steps, of which each size has as many as it has problems."""
    solved: dict[str, list[bool]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["reason"] == "sampled":
            solved.setdefault(row["prompt_id"], []).append(row["solved"])
    shares = [statistics.mean(of) for of in solved.values()]
    chosen = settings_of(*WAYS[PROFILED]).parts["curriculum"]
    sizes, trivial = chosen["sizes"], chosen["trivial"]
    return statistics.mean(
        next((size for size in sizes if size * share >= 1), sizes[-1]) for share in shares if 0 < share <= trivial
    )


def others(args: argparse.Namespace, out: Path) -> list[Run]:
    """All but the baselines, each to end with the tokens of the baseline of its seed."""
    spent = study.spent(baselines(args), out)

    def run(arm: str, seed: int) -> Run:
        tokens, steps, more = spent[seed], LONGEST * args.steps, tuple[str, ...]()
        if arm == PROFILED:
            file, cost = profile_of(seed, out)
            # Its phases are parts of train.steps: about as many as its tokens will last.
            steps = max(1, round((1 - cost / tokens) * args.steps * 8 / mean_size(file)))
            tokens, more = max(1, tokens - cost), (f"train.history={file}",)
        return run_of(arm, seed, args, *more, f"train.steps={steps}", f"train.max_generated={tokens}")

    arms = [arm for arm in args.arms if arm != BASELINE]
    return study.in_turns([[run(arm, seed) for arm in arms] for seed in args.seeds])


def of_run(rows: Rows, base: Rows, cost: int) -> dict[str, Any]:
    """What one run came to beside the baseline of its seed; `cost`: tokens of its profile."""
    trained = [row for row in rows if row["step"]]
    tokens = trained[-1]["tokens/generated"] + cost
    mixed = sum(row["group/mixed"] for row in trained)
    groups = sum(row["group/mixed"] / (1 - row["group/zero_std"]) for row in trained if row["group/zero_std"] < 1)
    return {
        **study.accuracies(rows),
        "share": study.share_reaching(rows, base, cost=cost),
        "mixed_per_million": 1e6 * mixed / tokens,
        "mixed_share": mixed / groups if groups else 0.0,
        "distinct": trained[-1]["prompts/distinct"],
        "steps": len(trained),
        "tokens": tokens,
    }


def allocation(run: Run, out: Path) -> list[tuple[float, float]]:
    """Of each problem the share of its last visits' rollouts that solved it, and how many there were a visit."""
    checkpoint = find_checkpoint(out / run.name).path
    assert checkpoint is not None, "a run that is complete has one"
    visits = load_state(checkpoint)["rules"]["history"]["visits"].values()
    later = [[visit for visit in of if visit[0] >= 0] for of in visits]
    return [(sum(v[1] for v in of) / sum(v[2] for v in of), statistics.mean(v[2] for v in of)) for of in later if of]


def draw_allocation(path: Path, points: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Rollouts a visit against the share of them that was right: a panel for each collector."""
    with plots.paper_style():
        import matplotlib.pyplot as plt

        size = (3.2 * len(points), 2.8)
        figure, panels = plt.subplots(1, len(points), figsize=size, sharey=True, squeeze=False, layout="constrained")
        for panel, (name, found) in zip(panels[0], points.items(), strict=True):
            x, y = np.array(found).T
            panel.plot(x, y, ".", markersize=3, alpha=0.5)
            panel.set_title(name)
        panels[0][0].set(ylabel="rollouts a visit", ylim=(0, None))  # of all panels, now that all are drawn
        figure.supxlabel("share of a problem's rollouts that are right", fontsize=9)
        path.write_bytes(plots.png(figure))


def report(args: argparse.Namespace, out: Path) -> None:
    """Tables to the screen; tables, figures and JSON to `out`."""
    base = {run.seed: study.read_rows(run, out) for run in baselines(args)}
    runs = [*baselines(args), *others(args, out)]
    rows: dict[str, dict[int, Rows]] = {}
    for arm in (BASELINE, *(arm for arm in args.arms if arm != BASELINE)):
        name = run_of(arm, 0, args).arm
        rows[arm] = {run.seed: study.read_rows(run, out) for run in runs if run.arm == name}
    costs = {seed: profile_of(seed, out)[1] if PROFILED in args.arms else 0 for seed in args.seeds}
    found = {
        arm: {seed: of_run(r, base[seed], costs[seed] if arm == PROFILED else 0) for seed, r in of.items()}
        for arm, of in rows.items()
    }
    lines = [[arm, *(column(list(of.values())) for column in COLUMNS.values())] for arm, of in found.items()]
    study.write_results(args, out, study.markdown(["arm", *COLUMNS], lines), {"results": found, "profiles": costs})
    panels = {
        name: {arm: [sampled(r) for r in rows[arm].values()] for arm in arms if arm in rows}
        for name, arms in {"which problems, how often": WAYS, "small groups": [BASELINE, *SMALL]}.items()
    }
    target = statistics.mean(sampled(r).accuracy[-1] for r in base.values())
    title = f"equal generated tokens, {len(args.seeds)} seed(s): mean and deviation; dashed: the baseline's end"
    for (name, arms), file in zip(panels.items(), FIGURES, strict=True):  # few enough arms each for all to be named
        study.plot(out / file, title, {name: arms}, {name: target})
    shown = [arm for arm in (BASELINE, "mixed", "dars", PROFILED) if arm in rows]
    seed = args.seeds[0]
    named = {run.arm: run for run in runs if run.seed == seed}
    draw_allocation(out / "allocation.png", {arm: allocation(named[arm], out) for arm in shown})


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    made = study.study_parser(__doc__, STEPS)
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    made.set_defaults(seeds=[1, 2, 3])
    return study.parsed(made, words, seeds=[1], steps=2, arms=[BASELINE, "mixed", PROFILED])


def main(words: Sequence[str] | None = None) -> None:
    args = options(words)
    if not plots.can_draw():
        raise SystemExit("the figures need matplotlib: pip install 'grpo-cli[plot]', or use scripts/reproduce.sh")
    out = study.folder(args, "frontier_a")
    study.run_all("train", {run.name: run.words for run in baselines(args)}, out, args)
    if PROFILED in args.arms:
        study.run_all("eval", profiles(args, out), out, args)
    study.run_all("train", {run.name: run.words for run in others(args, out)}, out, args)
    report(args, out)


if __name__ == "__main__":
    main()
