"""Compared runs as tables of text, which are printed; and as JSON, with every digit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from grpo_cli.report.compare import Arm, Comparison, Estimate
from grpo_cli.report.curves import accuracy_label
from grpo_cli.report.read import Run
from grpo_cli.support import terminal
from grpo_cli.support.formatting import duration, gib, short, shown

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Rows of text under column names. `numeric` columns are right-aligned; `marked` is the row of the best arm."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[str] = frozenset()
    marked: int | None = None
    title: str = ""


def show(comparison: Comparison, console: Console) -> None:
    """Print the report."""
    if comparison.arms:
        print_table(console, arm_table(comparison))
    for note in footnotes(comparison):
        console.print(Text(note, style="dim"), soft_wrap=not console.is_terminal)
    if comparison.left_out:
        console.print(Text("\nNot averaged:", style="bold"))
        print_table(console, run_table(comparison))
    for run in (run for arm in comparison.arms for run in arm.runs if run.notes):
        console.print(Text(f"note: {run.name}: {'; '.join(run.notes)}", style="yellow"))


def print_table(console: Console, table: Table) -> None:
    """Print a table, in which nothing is read as markup: it comes from files. In a file or a pipe rows are as long as
    they need to be."""
    title = Text(table.title, style="italic") if table.title else None
    made = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name, *cells in zip(table.columns, *table.rows, strict=True):
        longest = max((len(word) for cell in cells for word in cell.split()), default=0)
        if name in table.numeric:
            made.add_column(Text(name), justify="right", min_width=longest, overflow="fold")  # numbers are not wrapped
        else:
            made.add_column(Text(name), overflow="fold")
    for number, row in enumerate(table.rows):
        made.add_row(*map(Text, row), style="bold" if number == table.marked else None)
    width = Measurement.get(console, console.options.update(max_width=10_000), made).maximum
    if not console.is_terminal and width > console.width:
        console = terminal.console(console.file, width=width, force_terminal=False)
    console.print(made)


def _seconds(seconds: float) -> str:
    if not math.isfinite(seconds):
        return str(seconds)
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


# Columns of means over an arm's runs: the attribute of a run, and its format.
MEANS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "training time": ("seconds", _seconds),
    "generated tokens": ("generated_tokens", short),
    "trained tokens": ("trained_tokens", short),
    "peak memory": ("peak_bytes", gib),
}


def arm_table(comparison: Comparison) -> Table:
    """Return one row per arm: its settings, then means over its completed runs.

    Accuracies come with their intervals (a star marks one over problems); columns in which every cell is empty are left
    out.
    """
    target, arms, base = comparison.target, comparison.arms, comparison.base
    cells: dict[str, list[str]] = {"arm": [arm.label for arm in arms]}
    cells["runs"] = [str(len(arm.runs)) for arm in arms]
    starts = [arm.mean_curve.accuracy[:1] for arm in arms]
    cells["before"] = [f"{start[0]:.3f}" if start else "" for start in starts]
    cells["final accuracy"] = [_with_interval(arm.final_accuracy) for arm in arms]
    cells["difference"] = ["" if arm is base or not base else _with_interval(arm.less(base), "+.3f") for arm in arms]
    cells["time to target" if target is None else f"time to {target:.3f}"] = [
        NOTHING if target is None else _reached(arm, target) for arm in arms
    ]
    if base and target is not None:
        cells["times as fast"] = [
            "" if arm is base else _with_interval(arm.speedup(base, target), ".2f") for arm in arms
        ]
    for name, (figure, form) in MEANS.items():
        cells[name] = [form(mean.mean) if (mean := arm.mean(figure)) else NOTHING for arm in arms]
    numeric = frozenset(cells) - {"arm"}
    states = [Counter(run.state.value for run in arm.others) for arm in arms]
    cells["not averaged"] = [", ".join(f"{number} {state}" for state, number in counts.items()) for counts in states]
    filled = {name: column for name, column in cells.items() if any(column)}
    marked = arms.index(comparison.best) if comparison.best else None
    return Table(tuple(filled), tuple(zip(*filled.values(), strict=True)), numeric, marked)


def run_table(comparison: Comparison) -> Table:
    """Return one row per run that is not averaged: how it ended, its settings, how far it got, and remarks."""
    rows = []
    for run in comparison.left_out:
        settings, seed = run.recorded.settings, run.recorded.seed
        keys = comparison.columns if run.recorded.known else [key for key in run.recorded.typed if key != "seed"]
        label = " ".join(f"{key}={shown(settings[key])}" for key in keys if key in settings)
        steps = f"{run.steps}/{shown(settings['train.steps'])}" if "train.steps" in settings else str(run.steps)
        accuracy = NOTHING if run.final_accuracy is None else f"{run.final_accuracy:.3f}"
        reached = NOTHING if seed is None else shown(seed), steps, accuracy
        seconds = NOTHING if run.seconds is None else _seconds(run.seconds)
        remarks = "; ".join(filter(None, (run.reason, *run.notes)))
        rows.append((run.name, run.state.value, label, *reached, seconds, remarks))
    names = ("seed", "steps", "last accuracy", "training time")
    return Table(("run", "state", "settings", *names, "remarks"), tuple(rows), frozenset(names))


def footnotes(comparison: Comparison) -> list[str]:
    """Return notes below the tables."""
    arms, base = comparison.arms, comparison.base
    averaged = [run for arm in arms for run in arm.runs]
    notes = [
        f"Means over the {len(averaged)} completed of {len(averaged) + len(comparison.left_out)} runs, with Student's "
        f"95 % interval over seeds where they differ; accuracy is the held-out {accuracy_label(comparison.metric)}."
    ]
    if base and len(arms) > 1:
        notes.append(f"Difference: final accuracy less that of {base.label}, mean over the seeds that both have.")
    if any(arm.final_accuracy and arm.final_accuracy.over == "problems" for arm in arms):
        notes.append("* One seed, or seeds that agree: the interval is over the held-out problems, not over seeds.")
    if comparison.target is None:
        notes.append("No run was evaluated, so there is no accuracy (eval.every).")
    else:
        notes.append(
            f"Time to an accuracy of {comparison.target:.3f}: training seconds up to the first evaluation that reaches "
            "it, mean over the runs that get there; times as fast: geometric mean over the seeds with which both do."
        )
    codes = Counter(", ".join(f"{name} {version}" for name, version in run.code.items()) for run in averaged)
    if len(codes) > 1:
        each = "; ".join(f"{code or 'not recorded'} ({number} of the runs)" for code, number in codes.items())
        notes.append(f"These runs used different code but are compared as equals: {each}.")
    if also := [key for key in comparison.also if not key.endswith("_target_")]:
        notes.append(f"Also different, but only along with what tells the arms apart: {', '.join(also)}.")
    return notes


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return all numbers of the report, and every run's curve."""
    return {
        "metric": comparison.metric,
        "columns": comparison.columns,
        "also_different": comparison.also,
        "target_accuracy": comparison.target,
        "base": comparison.base.label if comparison.base else None,
        "arms": [_arm_json(arm, comparison) for arm in comparison.arms],
        "without_settings": [_run_json(run) for run in comparison.unknown],
    }


def _arm_json(arm: Arm, comparison: Comparison) -> dict[str, Any]:
    estimates = {"final_accuracy": arm.final_accuracy}
    estimates["difference"] = arm.less(comparison.base) if comparison.base else None
    if comparison.base and comparison.target is not None:
        estimates["speedup"] = arm.speedup(comparison.base, comparison.target)
    estimates |= {figure: arm.mean(figure) for figure, _ in MEANS.values()}
    return {
        "settings": arm.settings,
        **{name: None if found is None else asdict(found) for name, found in estimates.items()},
        "seconds_to_target": None if comparison.target is None else arm.reaching(comparison.target)[0],
        "runs": [_run_json(run) for run in arm.runs],
        "not_averaged": [_run_json(run) for run in arm.others],
    }


def _run_json(run: Run) -> dict[str, Any]:
    names = ("folder", "reason", "notes", "steps", "code", *(figure for figure, _ in MEANS.values()))
    facts = {"state": run.state.value, "seed": run.recorded.seed, "overrides": run.recorded.typed}
    return {**{name: getattr(run, name) for name in names}, **facts, "curve": asdict(run.curve)}


def _with_interval(found: Estimate | None, form: str = ".3f") -> str:
    if found is None:
        return NOTHING
    interval = f" ({found.low:{form}}–{found.high:{form}})" + "*" * (found.over == "problems")
    return f"{found.mean:{form}}" + (interval if found.over else "")


def _reached(arm: Arm, target: float) -> str:
    seconds, reached = arm.reaching(target)
    if seconds is None:
        return "never" if arm.curves else NOTHING
    return _seconds(seconds) + (f" ({reached} of {len(arm.curves)})" if reached < len(arm.curves) else "")
