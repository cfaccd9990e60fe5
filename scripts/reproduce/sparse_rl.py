"""Sparse-RL on the embedded task: can a policy learn from rollouts that saw only part of their keys?

    scripts/reproduce.sh sparse_rl                                      # everything; installs the extra `plot`
    scripts/reproduce.sh sparse_rl --seeds 0 --steps 20 --policies rkv --budget 12

Arms: `dense`, and for each eviction policy `sparse` (correction=none: measured, not corrected) and `sparse_rl` (tokens
reweighted, rollouts with an impossible token rejected). All arms get the same prompts in the same order where the seed
is the same. The problems are the embedded task's longer ones, whose worked solutions are several times as long as
the budget. Dense rollouts under the same correction are no arm: there the ratio is 1 to rounding, and nothing changes.

Accuracies are those of samples at temperature 1, and along a run those of its own sampler, keys evicted or not.
Afterwards each policy is evaluated by `grpo eval`, both dense and under each eviction, which is the robustness table.
Evaluation is kept out of the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import study
from study import ACCURACY, Column, Rows, Run, mean, over_seeds, sampled

from grpo_cli.config.choices import choices
from grpo_cli.config.overrides import overrides
from grpo_cli.report import plots

POLICIES = [name for name in choices("sparsity") if name != "dense"]
CORRECTIONS = {"sparse": "none", "sparse_rl": "sparse_rl"}
TASK = (
    *("task.min_terms=4", "task.max_terms=8", "sampling.max_new_tokens=96", "train.prompts=16", "n=16"),
    "optim.lr=2.5e-4",  # with twice as much the dense arm learns faster, and then unlearns part of it
    *("eval.every=20", "eval.problems=200", "eval.k=4"),
)
COLUMNS: dict[str, Column] = {
    "final accuracy": over_seeds("final_accuracy"),
    "of dense": over_seeds("of_dense"),
    "best": over_seeds("best_accuracy"),
    "final greedy": over_seeds("final_greedy"),
    "reads saved": mean("engine/kv_saving_mean", ".0%"),
    "peak saved": mean("engine/kv_saving_peak", ".0%"),
    "allocated saved": mean("engine/kv_saving_allocated", ".0%"),
    "log xi, 0.1 % quantile": mean("mismatch/log_ratio_q001"),
    "1 %": mean("mismatch/log_ratio_q01"),
    "least xi": lambda runs: format(min(run["lowest_ratio"] for run in runs), ".2g"),
    "rejected": mean("mismatch/rejected", ".2%"),
    "length": mean("response/length_mean", ".0f"),
    "rollout s/step": mean("rollout_seconds"),
}
MEANS = (
    *("engine/kv_saving_mean", "engine/kv_saving_peak", "engine/kv_saving_allocated", "engine/evictions"),
    *("mismatch/log_ratio_q001", "mismatch/log_ratio_q01", "mismatch/ratio_min", "mismatch/rejected"),
    *("response/length_mean", "response/truncated"),
)
DRAWN = {"mismatch/log_ratio_q001": "log xi, 0.1 % quantile", "mismatch/rejected": "share of rollouts rejected"}


def sparsity_words(policy: str, args: argparse.Namespace, window: int | None = None) -> tuple[str, ...]:
    """The words of an eviction policy, or of none (`dense`); `window` where it is not the one that we use."""
    if policy == "dense":
        return ("sparsity=dense",)
    if window is None:
        window = args.budget // 2 if policy == "h2o" else min(8, args.budget // 2)
    values = {"budget": args.budget, "buffer": args.buffer, "window": window}
    values["protect_prompt"] = str(not args.evict_prompts).lower()
    return (f"sparsity={policy}", *(f"sparsity.{key}={value}" for key, value in values.items()))


def planned(args: argparse.Namespace) -> list[Run]:
    """Every training run of the study, in the order in which they are started."""

    def run(policy: str, arm: str, seed: int) -> Run:
        rule = (f"correction={CORRECTIONS.get(arm, 'none')}", f"seed={seed}", f"train.steps={args.steps}")
        return Run(policy, arm, seed, (*TASK, *sparsity_words(policy, args), *rule, *study.QUIET))

    arms = [("dense", "dense"), *((policy, arm) for policy in args.policies for arm in args.arms)]
    return study.in_turns([[run(policy, arm, seed) for policy, arm in arms] for seed in args.seeds])


def evaluate_all(
    runs: Sequence[Run], args: argparse.Namespace, out: Path, caches: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Held-out accuracy of each run's policy, by the run and by the cache that it is evaluated in (words by name)."""
    words = {
        f"evaluations/{run.name}/{cache}": (
            *(word.lstrip("+") for word in overrides({"checkpoint": str(out / run.name)})),
            *(f"eval.problems={args.eval_problems}", "eval.k=4", *caches[cache]),
        )
        for run in runs
        for cache in caches
    }
    study.run_all("eval", words, out, args)
    read = {name: json.loads((out / name / "summary.json").read_text(encoding="utf-8")) for name in words}
    names = ("eval/accuracy", ACCURACY, "eval/length_mean", "engine/kv_saving_mean")
    return {
        run.name: {c: {name: read[f"evaluations/{run.name}/{c}"].get(name, 0.0) for name in names} for c in caches}
        for run in runs
    }


def of_run(rows: Rows) -> dict[str, float]:
    """What one run learnt, saved and lost, over its steps."""
    trained = [row for row in rows if row["step"]]
    return {
        **study.accuracies(rows),
        **study.mean_of(rows, *MEANS),
        "lowest_ratio": min(row["mismatch/ratio_min"] for row in trained),
        "kv_peak_bytes": max(row["engine/kv_peak_bytes"] for row in trained),
        "length_max": max(row["response/length_max"] for row in trained),
        "rollout_seconds": statistics.median(row["time/rollout"] for row in trained),
        "seconds_per_step": statistics.median(row["time/step"] for row in trained),
    }


def title_of(run: Run) -> str:
    correction = "corrected" if run.arm == "sparse_rl" else "uncorrected"
    return run.setting if run.setting == "dense" else f"{run.setting}, {correction}"


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The arms in the order of the tables, each with its runs by seed."""
    ordered = sorted(runs, key=lambda run: (run.setting != "dense", run.setting, run.arm, run.seed))
    return {title: [r for r in ordered if title_of(r) == title] for title in dict.fromkeys(map(title_of, ordered))}


def results_table(found: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    """One line per arm; mean ± standard deviation over seeds."""
    dense = found["dense"]
    lines = []
    for arm, seeds in found.items():
        runs = [{**run, "of_dense": run["final_accuracy"] / dense[s]["final_accuracy"]} for s, run in seeds.items()]
        lines.append([arm, *(column(runs) for column in COLUMNS.values())])
    return study.markdown(("arm", *COLUMNS), lines)


def robustness_table(
    arms: Mapping[str, Sequence[Run]], found: Mapping[str, Mapping[str, Mapping[str, float]]], caches: Sequence[str]
) -> str:
    """Accuracy of each trained policy under each cache that it was evaluated in."""

    def of(runs: Sequence[Run], cache: str) -> str:
        there = [found[run.name][cache][ACCURACY] for run in runs if cache in found[run.name]]
        return study.spread(there) if there else ""

    lines = [[arm, *(of(runs, cache) for cache in caches)] for arm, runs in arms.items()]
    return study.markdown(("trained", *(f"evaluated {cache}" for cache in caches)), lines)


def plot_mismatch(path: Path, rows: Mapping[str, Mapping[int, Rows]]) -> None:
    """Quantiles of log xi over the steps, means over seeds; the lower tail is where a collapse would show first."""
    from matplotlib.figure import Figure

    with plots.paper_style():
        figure = Figure(figsize=(11, 3.9), layout="constrained")
        for panel, (metric, words) in zip(figure.subplots(1, len(DRAWN)), DRAWN.items(), strict=True):
            for arm, seeds in rows.items():
                series = zip(*([row[metric] for row in run if row["step"]] for run in seeds.values()), strict=True)
                values = [statistics.mean(step) for step in series]
                panel.plot(range(1, len(values) + 1), values, label=arm)
            panel.set(xlabel="step", ylabel=words)
        figure.axes[0].legend(loc="lower left")
        path.write_bytes(plots.png(figure))


def report(args: argparse.Namespace, out: Path, runs: Sequence[Run]) -> None:
    """Tables to the screen; tables, figures and JSON to `out`."""
    arms = by_arm(runs)
    caches = {cache: sparsity_words(cache, args) for cache in ("dense", *args.policies)}
    evaluations = evaluate_all(runs, args, out, caches)
    rows = {arm: {run.seed: study.read_rows(run, out) for run in of_arm} for arm, of_arm in arms.items()}
    found = {arm: {seed: of_run(of_seed) for seed, of_seed in seeds.items()} for arm, seeds in rows.items()}
    text = f"{results_table(found)}\n\n{robustness_table(arms, evaluations, ('dense', *args.policies))}"
    curves = {arm: {seed: sampled(of_seed) for seed, of_seed in seeds.items()} for arm, seeds in rows.items()}
    drawn = {arm: {seed: asdict(curve) for seed, curve in seeds.items()} for arm, seeds in curves.items()}
    study.write_results(args, out, text, {"results": found, "evaluations": evaluations, "curves": drawn})
    title = f"Sparse-RL on the embedded task, {len(args.seeds)} seed(s); each arm evaluated by its own sampler"
    panel = {arm: list(seeds.values()) for arm, seeds in curves.items()}
    study.plot(out / "sparse_rl.png", title, {f"{args.budget} + {args.buffer} keys": panel}, {})
    plot_mismatch(out / "mismatch.png", rows)


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    made = study.study_parser(__doc__, steps=60)
    made.add_argument("--policies", nargs="+", choices=POLICIES, default=["rkv", "snapkv"])
    made.add_argument("--arms", nargs="+", choices=CORRECTIONS, default=list(CORRECTIONS), help="besides dense")
    made.add_argument("--budget", type=int, default=20, help="keys of the response that are kept")
    made.add_argument("--buffer", type=study.positive, default=4, help="steps between two evictions")
    made.add_argument("--evict-prompts", action="store_true", help="as published; the budget is then for both")
    made.add_argument("--eval-problems", type=int, default=300, help="of the robustness table; -1 for all")
    args = study.parsed(made, words, seeds=[0], steps=2, policies=["rkv"], arms=["sparse_rl"], eval_problems=20)
    if args.budget < 2:
        made.error("--budget must be at least 2")
    return args


if __name__ == "__main__":
    args = options()
    study.conduct(args, "sparse_rl", planned(args), report)
