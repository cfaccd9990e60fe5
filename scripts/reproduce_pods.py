"""PODS on the embedded task: how fast does training on few of many rollouts reach what training on all reaches?

    scripts/reproduce_pods.sh                                       # everything; needs the `plot` extra
    python scripts/reproduce_pods.py --seeds 0 --steps 20 --arms grpo_ga maxvar --settings default

Arms: `grpo` (n = m = 16, the equal-update baseline), `grpo_ga` (n = m = 64, the equal-generation baseline), and 16 of
64 chosen by each rule. All arms see equally many prompts per step, the same ones in the same order where the seed is
the same. Settings: `default` (conf/experiment/pods_arithmetic.yaml) and `update_bound` (pods_update_bound.yaml, where
updates cost more). Accuracy is that of samples at temperature 1 on held-out problems, four of each; evaluation is kept
out of the clock. Times are compared seed by seed: how long the baseline takes to 99 % of its own best accuracy, over
how long the arm takes to that accuracy. `undisturbed` is the same ratio with each step as short as in any of the seeds,
which takes out most of what else the machine did meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from study import (
    QUIET,
    Curve,
    Rows,
    Run,
    Speedup,
    conduct,
    curve_of,
    in_turns,
    markdown,
    plot,
    read_rows,
    speedup,
    spread,
    study_parser,
    undisturbed,
    write_results,
)

from grpo_cli.config.choices import choices
from grpo_cli.processor import settle

RULES = [rule for rule in choices("downsample") if rule != "all"]
ARMS = {
    "grpo": ("n=16", "m=16"),
    "grpo_ga": ("n=64", "m=64"),
    **{rule: ("n=64", "m=16", f"downsample={rule}") for rule in RULES},
}
BASELINES = ("grpo_ga", "grpo")
# Arms are given about as many seconds, not as many steps; the baseline is given enough to be past its peak.
STEPS = {"grpo_ga": 50}
# The experiment file of a setting, and its arms when none are named. What each rule chooses is compared in the first.
SETTINGS = {
    "default": ("pods_arithmetic", tuple(ARMS)),
    "update_bound": ("pods_update_bound", ("grpo", "grpo_ga", "maxvar", "random")),
}
SHOWN = {"grpo": "GRPO 16", "grpo_ga": "GRPO-GA 64"} | {rule: f"PODS 64→16 {rule}" for rule in RULES}
COLUMNS = (
    "arm",
    "final accuracy",
    "best",
    "final greedy",
    "sooner than GRPO-GA",
    "undisturbed",
    "sooner than GRPO",
    "undisturbed",
    "s/step",
    "rollout",
    "update",
    "equal groups",
    "after choosing",
    "generated tokens",
    "trained tokens",
)


def planned(args: argparse.Namespace) -> list[Run]:
    """Every run of the study, in the order in which they are started."""

    def words(setting: str, arm: str, seed: int) -> tuple[str, ...]:
        steps = STEPS.get(arm) if args.steps is None else args.steps
        length = () if steps is None else (f"train.steps={steps}",)
        return (f"experiment={SETTINGS[setting][0]}", *ARMS[arm], f"seed={seed}", *length, *QUIET)

    rounds = [
        [
            Run(setting, arm, seed, words(setting, arm, seed))
            for setting in args.settings
            for arm in args.arms or SETTINGS[setting][1]
        ]
        for seed in args.seeds
    ]
    return in_turns(rounds)


def of_arm(rows: Rows) -> dict[str, float]:
    """Where one run's time went, and how many of its groups taught nothing."""
    trained = [row for row in rows if row["step"]]
    seconds = sum(row["time/step"] for row in trained)
    logprobs_and_update = sum(row["time/update"] + row["time/logprobs"] for row in trained)
    last, curve = trained[-1], curve_of(rows)
    return {
        "final_accuracy": curve.accuracy[-1],
        "best_accuracy": max(curve.accuracy),
        "final_greedy": curve.greedy[-1],
        "train_seconds": last["clock/train_seconds"],
        "seconds_per_step": statistics.median(row["time/step"] for row in trained),
        "rollout_share": sum(row["time/rollout"] for row in trained) / seconds,
        "update_share": logprobs_and_update / seconds,
        "zero_std": statistics.mean(row["group/zero_std"] for row in trained),
        "zero_std_kept": statistics.mean(row["group/zero_std_kept"] for row in trained),
        "reward_mean": statistics.mean(row["reward/mean"] for row in trained),
        "reward_kept_mean": statistics.mean(row["reward/kept_mean"] for row in trained),
        "length_mean": statistics.mean(row["response/length_mean"] for row in trained),
        "generated_tokens": last["tokens/generated"],
        "trained_tokens": last["tokens/trained"],
    }


def of_setting(arms: Mapping[str, Mapping[int, Rows]]) -> dict[str, Any]:
    """Rows by arm and seed to what is reported of a setting."""
    curves = {arm: {seed: curve_of(rows) for seed, rows in runs.items()} for arm, runs in arms.items()}
    quiet = {arm: undisturbed(runs) for arm, runs in arms.items()}
    found: dict[str, Any] = {}
    for arm, runs in arms.items():
        bases = [base for base in BASELINES if base in arms and base != arm]
        found[arm] = {
            "runs": {seed: of_arm(rows) for seed, rows in runs.items()},
            "sooner_than": {base: shown(speedup(curves[base], curves[arm])) for base in bases},
            "sooner_than_undisturbed": {base: shown(speedup(quiet[base], quiet[arm])) for base in bases},
            "curves": {seed: asdict(curve) for seed, curve in curves[arm].items()},
        }
    return found


def shown(ratio: Speedup) -> dict[str, Any]:
    return {**asdict(ratio), "shown": str(ratio)}


def table(found: Mapping[str, Any]) -> str:
    """One line per arm; mean ± standard deviation over seeds."""
    lines = []
    for arm, numbers in found.items():
        runs = list(numbers["runs"].values())

        def over_seeds(name: str, digits: int = 3, runs: Sequence[Mapping[str, float]] = runs) -> str:
            return spread((run[name] for run in runs), digits)

        def share(name: str, runs: Sequence[Mapping[str, float]] = runs) -> str:
            return f"{statistics.mean(run[name] for run in runs):.0%}"

        kinds = (numbers["sooner_than"], numbers["sooner_than_undisturbed"])
        sooner = [kind[base]["shown"] if base in kind else "" for base in BASELINES for kind in kinds]
        shares = [share(name) for name in ("rollout_share", "update_share", "zero_std", "zero_std_kept")]
        tokens = [
            f"{statistics.mean(run[n] for run in runs) / 1e3:.0f}k" for n in ("generated_tokens", "trained_tokens")
        ]
        accuracies = [over_seeds("final_accuracy"), over_seeds("best_accuracy"), over_seeds("final_greedy")]
        lines.append([SHOWN[arm], *accuracies, *sooner, over_seeds("seconds_per_step"), *shares, *tokens])
    return markdown(COLUMNS, lines)


def target(found: Mapping[str, Any]) -> float:
    """99 % of the best mean accuracy of the first baseline that was run."""
    base = next(base for base in BASELINES if base in found)
    curves = [Curve(**curve) for curve in found[base]["curves"].values()]
    return 0.99 * max(map(statistics.mean, zip(*(curve.accuracy for curve in curves), strict=True)))


def parsed_words(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_parser(__doc__, "pods", steps=None)
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all, in update_bound without some rules")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    return parser.parse_args(arguments)


def report(args: argparse.Namespace, out: Path, runs: Sequence[Run]) -> None:
    """Tables to the screen; tables, figure and JSON to `out`."""
    rows: dict[str, dict[str, dict[int, Rows]]] = {}
    for run in sorted(runs, key=lambda run: (list(SETTINGS).index(run.setting), list(ARMS).index(run.arm), run.seed)):
        rows.setdefault(run.setting, {}).setdefault(run.arm, {})[run.seed] = read_rows(run, out)
    found = {setting: of_setting(arms) for setting, arms in rows.items()}
    text = "\n\n".join(f"{setting}\n\n{table(arms)}" for setting, arms in found.items())
    write_results(args, out, "pods", text, {"results": found})
    panels = {
        setting: {SHOWN[arm]: [curve_of(r) for r in of_seeds.values()] for arm, of_seeds in arms.items()}
        for setting, arms in rows.items()
    }
    targets = {setting: target(arms) for setting, arms in found.items() if set(BASELINES) & arms.keys()}
    seeds = f"{len(args.seeds)} seeds, mean and standard deviation" if len(args.seeds) > 1 else "1 seed"
    title = f"PODS on the embedded task: {seeds}; dashed: 99 % of the baseline's best mean"
    plot(out / "pods.png", title, panels, targets)


if __name__ == "__main__":
    settle()
    args = parsed_words()
    conduct(args, planned(args), report)
