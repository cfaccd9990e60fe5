"""How many decode steps each scheduler takes, with each predictor and sampler, on recorded or synthetic lengths.

    python scripts/simulate_schedules.py                                         lognormal, uniform and bimodal lengths
    python scripts/simulate_schedules.py --trace outputs/train/<run>/rollouts.jsonl --slots 16
    python scripts/simulate_schedules.py --plans                                 quality and time of the fptas plans

A recorded trace needs all rollouts of a run (record.rollouts=-1). `prefix` is simulated: the true lengths, disturbed to
a rank correlation of --tau, and charged for the probing. Everything else is the schedulers that `grpo train` uses.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from grpo_cli.engine.lengths import read_trace
from grpo_cli.engine.makespan import assign
from grpo_cli.engine.simulate import DISTRIBUTIONS, Outcome, compare, synthetic_trace
from grpo_cli.errors import UserError

console = Console(width=100 if not sys.stdout.isatty() else None)


def main(
    trace: Annotated[Path | None, typer.Option(help="A rollouts.jsonl; without it, lengths are made up.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Slots of the engine.")] = 16,
    n: Annotated[int, typer.Option(min=1, help="Made up: rollouts per prompt.")] = 32,
    prompts: Annotated[int, typer.Option(min=1, help="Made up: prompts per step.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Made up: steps.")] = 10,
    mean: Annotated[float, typer.Option(min=1, help="Made up: mean length in tokens.")] = 250,
    cv: Annotated[float, typer.Option(min=0, help="Made up, lognormal: coefficient of variation.")] = 0.7,
    limit: Annotated[int, typer.Option(min=2, help="Made up: the most tokens of a rollout.")] = 1024,
    tau: Annotated[float, typer.Option(min=-1, max=1, help="Kendall's tau of the simulated prefix predictor.")] = 0.4,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Tokens that the prefix predictor looks at.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the made-up lengths and the disturbance.")] = 0,
    plans: Annotated[bool, typer.Option("--plans", help="Show quality and time of fptas plans instead.")] = False,
    out: Annotated[Path, typer.Option(help="Where the figures go as JSON.")] = Path("outputs/simulate_schedules.json"),
) -> None:
    """Compare schedulers on length traces: decode steps, slot utilisation, distance from the lower bound."""
    found: dict[str, object]
    if plans:
        found = {"plans": show_plans(seed)}
    else:
        traces = (
            {str(trace): read_trace(trace)}
            if trace is not None
            else {name: synthetic_trace(name, steps, prompts, n, mean, cv, limit, seed) for name in DISTRIBUTIONS}
        )
        found = {"slots": slots, "tau": tau, "prefix_tokens": prefix_tokens, "seed": seed}
        for name, rows in traces.items():
            outcomes = compare(rows, slots, tau, prefix_tokens, seed)
            lengths = np.array([row.length for row in rows])
            title = (
                f"{name}: {len(rows)} rollouts, {slots} slots, CV of the lengths {lengths.std() / lengths.mean():.2f}"
            )
            console.print(table(title, outcomes))
            found[name] = [asdict(outcome) for outcome in outcomes]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    console.print(f"Figures: {out}")


def table(title: str, outcomes: list[Outcome]) -> Table:
    """One row per scheduler and predictor; steps are also given relative to `micro` without any prediction."""
    reference = next(o for o in outcomes if (o.sampler, o.scheduler, o.predictor) == ("micro", "fifo", "none"))
    shown = Table(title=title, title_justify="left")
    for name in ("sampler", "predictor", "scheduler"):
        shown.add_column(name)
    for name in ("decode steps", "of micro fifo", "utilisation", "steps / bound", "tau"):
        shown.add_column(name, justify="right")
    for o in sorted(outcomes, key=lambda o: o.sampler, reverse=True):
        tau = "" if o.kendall_tau is None else f"{o.kendall_tau:.2f}"
        share = f"{o.decode_steps / reference.decode_steps:.3f}"
        figures = (str(o.decode_steps), share, f"{o.slot_utilisation:.3f}", f"{o.bound_ratio:.3f}", tau)
        shown.add_row(o.sampler, o.predictor, o.scheduler, *figures)
    return shown


def show_plans(seed: int, instances: int = 30) -> list[dict[str, object]]:
    """Plans for true lengths. `of proven` compares with the best bound that is proven: the rest no planner can gain."""
    shown = Table(title=f"fptas plans of true lengths, {instances} instances each", title_justify="left")
    for name in ("lengths", "n", "slots", "of bound", "worst", "of proven", "worst", "ms", "slowest"):
        shown.add_column(name, justify="left" if name == "lengths" else "right")
    rows: list[dict[str, object]] = []
    for kind in ("lognormal", "uniform"):
        for n in (32, 64, 128):
            for slots in (2, 3, 4, 8, 16, 32):
                row = _plan_quality(kind, n, slots, instances, seed)
                rows.append(row)
                figures = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values())
                shown.add_row(*list(figures)[:-1])
    console.print(shown)
    return rows


def _plan_quality(kind: str, n: int, slots: int, instances: int, seed: int) -> dict[str, object]:
    bound, proven, seconds, makers = [], [], [], set()
    for i in range(instances):
        lengths = [row.length for row in synthetic_trace(kind, 1, 1, n, 250.0, 0.7, 1024, seed + i)]
        begin = time.perf_counter()
        plan = assign(lengths, slots, epsilon=0.1, max_states=20_000)
        seconds.append(1e3 * (time.perf_counter() - begin))
        bound.append(plan.bound_ratio)
        proven.append(plan.makespan / plan.proven_bound)
        makers.add(plan.algorithm)
    return {
        "lengths": kind,
        "n": n,
        "slots": slots,
        "bound_ratio": float(np.mean(bound)),
        "bound_ratio_worst": max(bound),
        "proven_ratio": float(np.mean(proven)),
        "proven_ratio_worst": max(proven),
        "milliseconds": float(np.median(seconds)),
        "milliseconds_worst": max(seconds),
        "made_by": " ".join(sorted(makers)),
    }


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
