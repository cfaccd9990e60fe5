"""Sparse-RL on the embedded task: can a policy learn from rollouts that saw only part of their keys?

    scripts/reproduce_sparse_rl.sh                                      # everything; needs the `plot` extra
    python scripts/reproduce_sparse_rl.py --seeds 0 --steps 20 --policies rkv --budget 12

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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from study import (
    ACCURACY,
    QUIET,
    Rows,
    Run,
    conduct,
    curve_of,
    grpo,
    in_turns,
    markdown,
    plot,
    positive,
    read_rows,
    spread,
    study_parser,
    write_results,
)

from grpo_cli.config.choices import choices
from grpo_cli.config.overrides import overrides
from grpo_cli.processor import settle

POLICIES = [name for name in choices("sparsity") if name != "dense"]
CORRECTIONS = {"sparse": "none", "sparse_rl": "sparse_rl"}
TASK = (
    "task.min_terms=4",
    "task.max_terms=8",
    "sampling.max_new_tokens=96",
    "train.prompts=16",
    "n=16",
    # With twice as much the dense arm learns faster, and then unlearns part of it.
    "optim.lr=2.5e-4",
    "eval.every=20",
    "eval.problems=200",
    "eval.k=4",
)
SAVINGS = ("kv_saving_mean", "kv_saving_peak", "kv_saving_allocated")
MISMATCH = ("mismatch/log_ratio_q001", "mismatch/log_ratio_q01", "mismatch/ratio_min", "mismatch/rejected")
COLUMNS = (
    "arm",
    "final accuracy",
    "of dense",
    "best",
    "final greedy",
    "reads saved",
    "peak saved",
    "allocated saved",
    "log xi, 0.1 % quantile",
    "1 %",
    "least xi",
    "rejected",
    "length",
    "rollout s/step",
)


def sparsity_words(policy: str, args: argparse.Namespace) -> tuple[str, ...]:
    """The words of an eviction policy, or of none (`dense`)."""
    if policy == "dense":
        return ("sparsity=dense",)
    protected = str(not args.evict_prompts).lower()
    window = args.budget // 2 if policy == "h2o" else min(8, args.budget // 2)
    return (
        f"sparsity={policy}",
        f"sparsity.budget={args.budget}",
        f"sparsity.buffer={args.buffer}",
        f"sparsity.window={window}",
        f"sparsity.protect_prompt={protected}",
    )


def planned(args: argparse.Namespace) -> list[Run]:
    """Every training run of the study, in the order in which they are started."""

    def run(policy: str, arm: str, correction: str, seed: int) -> Run:
        words = (*TASK, *sparsity_words(policy, args), f"correction={correction}", f"seed={seed}")
        return Run(policy, arm, seed, (*words, f"train.steps={args.steps}", *QUIET))

    rounds = [
        [
            run("dense", "dense", "none", seed),
            *(run(p, arm, CORRECTIONS[arm], seed) for p in args.policies for arm in args.arms),
        ]
        for seed in args.seeds
    ]
    return in_turns(rounds)


def evaluate(run: Run, policy: str, args: argparse.Namespace, out: Path) -> dict[str, float]:
    """Held-out accuracy of a finished run's policy when its cache is evicted by `policy`, or is dense."""
    folder = out / "evaluations" / run.name / policy
    words = [f"eval.problems={args.eval_problems}", *sparsity_words(policy, args), "eval.k=4"]
    summary = folder / "summary.json"
    asked = folder / "words.json"
    if not (summary.is_file() and asked.is_file() and json.loads(asked.read_text()) == words):
        folder.mkdir(parents=True, exist_ok=True)
        places = overrides({"checkpoint": str(out / run.name), "hydra.run.dir": str(folder)})
        ended = grpo(["eval", places[0].lstrip("+"), *words, places[1]], folder / "log.txt", args.threads)
        if ended:
            raise SystemExit(f"evaluating {run.name} failed (exit code {ended}); see {folder / 'log.txt'}")
        asked.write_text(json.dumps(words))
    found = json.loads(summary.read_text())
    return {name: found[name] for name in ("eval/accuracy", "eval/pass@1", "eval/length_mean")}


def evaluate_all(runs: Sequence[Run], args: argparse.Namespace, out: Path) -> dict[str, dict[str, dict[str, float]]]:
    """By run and by the sparsity that it is evaluated under."""
    pairs = [(run, policy) for run in runs for policy in ("dense", *args.policies)]
    with ThreadPoolExecutor(args.jobs) as pool:
        answers = list(pool.map(lambda pair: evaluate(*pair, args, out), pairs))
    found: dict[str, dict[str, dict[str, float]]] = {run.name: {} for run in runs}
    for (run, policy), answer in zip(pairs, answers, strict=True):
        found[run.name][policy] = answer
    return found


def of_run(rows: Rows) -> dict[str, float]:
    """What one run learnt, saved and lost, over its steps."""
    trained = [row for row in rows if row["step"]]
    curve = curve_of(rows)
    return {
        "final_accuracy": curve.accuracy[-1],
        "best_accuracy": max(curve.accuracy),
        "final_greedy": curve.greedy[-1],
        **{name: statistics.mean(row.get(f"engine/{name}", 0.0) for row in trained) for name in SAVINGS},
        **{name: statistics.mean(row[name] for row in trained) for name in MISMATCH},
        "lowest_ratio": min(row["mismatch/ratio_min"] for row in trained),
        "kv_peak_bytes": max(row["engine/kv_peak_bytes"] for row in trained),
        "evictions": statistics.mean(row.get("engine/evictions", 0.0) for row in trained),
        "length_mean": statistics.mean(row["response/length_mean"] for row in trained),
        "length_max": max(row["response/length_max"] for row in trained),
        "truncated": statistics.mean(row["response/truncated"] for row in trained),
        "rollout_seconds": statistics.median(row["time/rollout"] for row in trained),
        "seconds_per_step": statistics.median(row["time/step"] for row in trained),
    }


def arms_of(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    """The arms in the order of the tables, each with its runs by seed."""
    dense_first = sorted(runs, key=lambda run: (run.setting != "dense", run.setting))
    names = dict.fromkeys(f"{run.setting} {run.arm}" for run in dense_first)
    for name in names:
        yield name, sorted((r for r in runs if f"{r.setting} {r.arm}" == name), key=lambda r: r.seed)


def arm_title(name: str) -> str:
    policy, arm = name.split()
    return "dense" if policy == "dense" else f"{policy}, {'corrected' if arm == 'sparse_rl' else 'uncorrected'}"


def results_table(found: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    """One line per arm; mean ± standard deviation over seeds."""
    lines = []
    for name, seeds in found.items():
        runs = list(seeds.values())
        dense = found["dense dense"]
        shares = [seeds[seed]["final_accuracy"] / dense[seed]["final_accuracy"] for seed in seeds if seed in dense]

        def mean(key: str, form: str = ".2g", runs: Sequence[Mapping[str, float]] = runs) -> str:
            return format(statistics.mean(run[key] for run in runs), form)

        lines.append(
            [
                arm_title(name),
                spread(run["final_accuracy"] for run in runs),
                spread(shares),
                spread(run["best_accuracy"] for run in runs),
                spread(run["final_greedy"] for run in runs),
                *(mean(key, ".0%") for key in SAVINGS),
                mean("mismatch/log_ratio_q001"),
                mean("mismatch/log_ratio_q01"),
                format(min(run["lowest_ratio"] for run in runs), ".2g"),
                mean("mismatch/rejected", ".2%"),
                mean("length_mean", ".0f"),
                mean("rollout_seconds"),
            ]
        )
    return markdown(COLUMNS, lines)


def robustness_table(
    runs: Sequence[Run], evaluations: Mapping[str, Mapping[str, Mapping[str, float]]], policies: Sequence[str]
) -> str:
    """Accuracy of each trained policy under each cache."""
    lines = []
    for name, of_arm in arms_of(runs):
        by_cache = [[evaluations[run.name][cache][ACCURACY] for run in of_arm] for cache in ("dense", *policies)]
        lines.append([arm_title(name), *map(spread, by_cache)])
    return markdown(("trained", *(f"evaluated {cache}" for cache in ("dense", *policies))), lines)


def plot_mismatch(path: Path, rows: Mapping[str, Sequence[Rows]]) -> None:
    """Quantiles of log xi over the steps, means over seeds; the lower tail is where a collapse would show first."""
    import matplotlib  # the extra `plot`

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {"mismatch/log_ratio_q001": "log xi, 0.1 % quantile", "mismatch/rejected": "share of rollouts rejected"}
    figure, line = pyplot.subplots(1, len(panels), figsize=(11, 3.9), layout="constrained")
    for panel, (metric, words) in zip(line, panels.items(), strict=True):
        for arm, of_seeds in rows.items():
            series = zip(*([row[metric] for row in run if row["step"]] for run in of_seeds), strict=True)
            values = [statistics.mean(step) for step in series]
            panel.plot(range(1, len(values) + 1), values, label=arm_title(arm), linewidth=1.5)
        panel.set_xlabel("step")
        panel.set_ylabel(words)
        panel.grid(alpha=0.25)
    line[0].legend(loc="lower left", fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def report(args: argparse.Namespace, out: Path, runs: Sequence[Run]) -> None:
    """Tables to the screen; tables, figures and JSON to `out`."""
    rows = {name: {run.seed: read_rows(run, out) for run in of_arm} for name, of_arm in arms_of(runs)}
    found = {name: {seed: of_run(of_seed) for seed, of_seed in seeds.items()} for name, seeds in rows.items()}
    evaluations = evaluate_all(runs, args, out)
    text = f"{results_table(found)}\n\n{robustness_table(runs, evaluations, args.policies)}"
    curves = {name: {seed: asdict(curve_of(r)) for seed, r in seeds.items()} for name, seeds in rows.items()}
    results = {"results": found, "evaluations": evaluations, "curves": curves}
    write_results(args, out, "sparse_rl", text, results)
    panel = {arm_title(name): [curve_of(of_seed) for of_seed in seeds.values()] for name, seeds in rows.items()}
    title = f"Sparse-RL on the embedded task, {len(args.seeds)} seeds; each arm evaluated by its own sampler"
    plot(out / "sparse_rl.png", title, {f"{args.budget} + {args.buffer} keys": panel}, {})
    plot_mismatch(out / "mismatch.png", {name: list(seeds.values()) for name, seeds in rows.items()})


def parsed_words(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_parser(__doc__, "sparse_rl", steps=60)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["rkv", "snapkv"])
    parser.add_argument("--arms", nargs="+", choices=CORRECTIONS, default=list(CORRECTIONS), help="besides dense")
    parser.add_argument("--budget", type=int, default=20, help="keys of the response that are kept")
    parser.add_argument("--buffer", type=positive, default=4, help="steps between two evictions")
    parser.add_argument("--evict-prompts", action="store_true", help="as published; the budget is then for both")
    parser.add_argument("--eval-problems", type=int, default=300, help="of the robustness table; -1 for all")
    args = parser.parse_args(arguments)
    if args.budget < 2:
        parser.error("--budget must be at least 2")
    return args


if __name__ == "__main__":
    settle()
    args = parsed_words()
    conduct(args, planned(args), report)
