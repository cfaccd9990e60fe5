"""PODS on the embedded task: how fast does training on few of many rollouts reach what training on all reaches?

    scripts/reproduce.sh pods                                       # everything; installs the extra `plot`
    scripts/reproduce.sh pods --seeds 0 --steps 20 --arms grpo_ga maxvar --settings default

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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import study
from study import Column, Rows, Run, mean, over_seeds, sampled

from grpo_cli.config.choices import choices
from grpo_cli.report.curves import mean_curve

BASELINES = {"grpo_ga": "GRPO-GA", "grpo": "GRPO"}
GROUPS = {"grpo": ("n=16", "m=16"), "grpo_ga": ("n=64", "m=64")}


@dataclass(frozen=True)
class Plan:
    """A study of arms: the baselines, and 16 of 64 chosen by `rules`, which are words for each."""

    name: str
    task: str  # for the figure's title
    rules: Mapping[str, str]
    # The experiment of a setting with more words, and its arms when none are named.
    settings: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    # Arms are given about as many seconds, not as many steps; a baseline is given enough to be past its peak.
    steps: Mapping[str, int]

    @property
    def arms(self) -> dict[str, tuple[str, ...]]:
        return GROUPS | {rule: ("n=64", "m=16", words) for rule, words in self.rules.items()}

    @property
    def shown(self) -> dict[str, str]:
        return {"grpo": "GRPO 16", "grpo_ga": "GRPO-GA 64"} | {rule: f"PODS 64→16 {rule}" for rule in self.rules}


# Those that choose any m of n, which median does not.
RULES = {rule: f"downsample={rule}" for rule in choices("downsample") if rule not in ("all", "median")}
EMBEDDED = Plan(
    name="pods",
    task="the embedded task",
    rules=RULES,
    # What each rule chooses is compared in the first.
    settings={
        "default": (("experiment=pods_arithmetic",), (*GROUPS, *RULES)),
        "update_bound": (("experiment=pods_update_bound",), ("grpo", "grpo_ga", "maxvar", "random")),
    },
    steps={"grpo_ga": 50},
)
BEFORE: dict[str, Column] = {
    "final accuracy": over_seeds("final_accuracy"),
    "best": over_seeds("best_accuracy"),
    "final greedy": over_seeds("final_greedy"),
}
AFTER: dict[str, Column] = {
    "s/step": over_seeds("seconds_per_step"),
    "rollout": mean("rollout_share", ".0%"),
    "update": mean("update_share", ".0%"),
    "equal groups": mean("group/zero_std", ".0%"),
    "after choosing": mean("group/zero_std_kept", ".0%"),
    "generated tokens": mean("tokens/generated", ",.0f"),
    "trained tokens": mean("tokens/trained", ",.0f"),
}
MEANS = ("group/zero_std", "group/zero_std_kept", "reward/mean", "reward/kept_mean", "response/length_mean")


def planned(args: argparse.Namespace, plan: Plan = EMBEDDED) -> list[Run]:
    """Every run of the study, in the order in which they are started."""

    def words(setting: str, arm: str, seed: int) -> tuple[str, ...]:
        steps = plan.steps.get(arm) if args.steps is None else args.steps
        length = () if steps is None else (f"train.steps={steps}",)
        return (*plan.settings[setting][0], *plan.arms[arm], f"seed={seed}", *length, *study.QUIET)

    arms = [(setting, arm) for setting in args.settings for arm in args.arms or plan.settings[setting][1]]
    return study.in_turns([[Run(s, arm, seed, words(s, arm, seed)) for s, arm in arms] for seed in args.seeds])


def of_run(rows: Rows) -> dict[str, float]:
    """What one run learnt, where its time went, and how many of its groups taught nothing."""
    trained = [row for row in rows if row["step"]]
    seconds = sum(row["time/step"] for row in trained)
    last = {name: trained[-1][name] for name in ("clock/train_seconds", "tokens/generated", "tokens/trained")}
    return {
        **study.accuracies(rows),
        **study.mean_of(rows, *MEANS),
        **last,
        "seconds_per_step": statistics.median(row["time/step"] for row in trained),
        "rollout_share": sum(row["time/rollout"] for row in trained) / seconds,
        "update_share": sum(row["time/update"] + row["time/logprobs"] for row in trained) / seconds,
    }


def of_setting(arms: Mapping[str, Mapping[int, Rows]]) -> dict[str, Any]:
    """Rows by arm and seed to what is reported of a setting."""
    clocks = {"sooner_than": lambda runs: {seed: sampled(rows) for seed, rows in runs.items()}}
    clocks["sooner_than_undisturbed"] = study.undisturbed
    curves = {kind: {arm: clock(runs) for arm, runs in arms.items()} for kind, clock in clocks.items()}
    found: dict[str, Any] = {}
    for arm, runs in arms.items():
        bases = [base for base in BASELINES if base in arms and base != arm]
        ratios = {kind: {base: study.speedup(of[base], of[arm]) for base in bases} for kind, of in curves.items()}
        found[arm] = {
            "runs": {seed: of_run(rows) for seed, rows in runs.items()},
            **{kind: {base: asdict(r) | {"shown": str(r)} for base, r in of.items()} for kind, of in ratios.items()},
            "curves": {seed: asdict(curve) for seed, curve in curves["sooner_than"][arm].items()},
        }
    return found


def table(found: Mapping[str, Any], plan: Plan) -> str:
    """One line per arm; mean ± standard deviation over seeds."""
    lines = []
    for arm, numbers in found.items():
        kinds = (numbers["sooner_than"], numbers["sooner_than_undisturbed"])
        sooner = [kind[base]["shown"] if base in kind else "" for base in BASELINES for kind in kinds]
        before, after = ([column(list(numbers["runs"].values())) for column in of.values()] for of in (BEFORE, AFTER))
        lines.append([plan.shown[arm], *before, *sooner, *after])
    than = [heading for name in BASELINES.values() for heading in (f"sooner than {name}", "undisturbed")]
    return study.markdown(["arm", *BEFORE, *than, *AFTER], lines)


def study_options(plan: Plan, text: str | None) -> argparse.ArgumentParser:
    made = study.study_parser(text, steps=None)
    made.add_argument("--arms", nargs="+", choices=plan.arms, help="default: all that the setting is for")
    made.add_argument("--settings", nargs="+", choices=plan.settings, default=list(plan.settings))
    return made


def parsed(made: argparse.ArgumentParser, words: Sequence[str] | None, plan: Plan) -> argparse.Namespace:
    first = next(iter(plan.settings))
    return study.parsed(made, words, seeds=[0], steps=2, arms=["grpo_ga", "maxvar"], settings=[first])


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    return parsed(study_options(EMBEDDED, __doc__), words, EMBEDDED)


def report(args: argparse.Namespace, out: Path, runs: Sequence[Run], plan: Plan = EMBEDDED) -> None:
    """Tables to the screen; tables, figure and JSON to `out`."""
    rows: dict[str, dict[str, dict[int, Rows]]] = {}
    places = (list(plan.settings), list(plan.arms))
    for run in sorted(runs, key=lambda run: (places[0].index(run.setting), places[1].index(run.arm), run.seed)):
        rows.setdefault(run.setting, {}).setdefault(run.arm, {})[run.seed] = study.read_rows(run, out)
    found = {setting: of_setting(arms) for setting, arms in rows.items()}
    text = "\n\n".join(f"{setting}\n\n{table(arms, plan)}" for setting, arms in found.items())
    study.write_results(args, out, text, {"results": found})
    panels = {s: {arm: [sampled(r) for r in seeds.values()] for arm, seeds in arms.items()} for s, arms in rows.items()}
    first = {setting: next((base for base in BASELINES if base in arms), None) for setting, arms in panels.items()}
    targets = {s: 0.99 * max(mean_curve(panels[s][base]).accuracy) for s, base in first.items() if base}
    named = {setting: {plan.shown[arm]: curves for arm, curves in arms.items()} for setting, arms in panels.items()}
    title = f"PODS on {plan.task}, {len(args.seeds)} seed(s): mean and standard deviation; dashed: 99 % of"
    study.plot(out / f"{plan.name}.png", f"{title} the baseline's best mean", named, targets)


if __name__ == "__main__":
    args = options()
    study.conduct(args, EMBEDDED.name, planned(args), partial(report, plan=EMBEDDED))
