"""Tables of text, which are printed: compared runs, also as JSON with every digit; evaluations and profiles."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from grpo_cli.report.compare import Arm, Comparison, Estimate, estimate
from grpo_cli.report.curves import accuracy_label
from grpo_cli.report.read import Run
from grpo_cli.report.recorded_settings import words
from grpo_cli.runs.files import read_object
from grpo_cli.runs.layout import PROFILE, SUMMARY
from grpo_cli.support import terminal
from grpo_cli.support.formatting import duration, gib, is_a, short, shown

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Rows of text under column names. `numeric` columns are right-aligned; `marked` is a bold row."""

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
    """Print a table, in which nothing is read as markup: it comes from files. Cells are as wide as they need to be; in
    a terminal columns that have no room follow below, beside the first column again."""
    widths = [3 + max(map(cell_len, cells)) for cells in zip(table.columns, *table.rows, strict=True)]
    room = console.width if console.is_terminal else sum(widths)
    parts = [[0]]
    for i in range(1, len(widths)):
        if len(parts[-1]) > 1 and sum(widths[j] for j in (*parts[-1], i)) > room + 3:
            parts.append([0])
        parts[-1].append(i)
    for part in parts:
        console.print(Text(table.title * (part is parts[0]), style="italic"))
        for number, row in enumerate((table.columns, *table.rows), -1):
            spaces = {i: " " * (widths[i] - 3 - cell_len(row[i])) for i in part}
            cells = (spaces[i] + row[i] if table.columns[i] in table.numeric else row[i] + spaces[i] for i in part)
            line = Text("   ".join(cells).rstrip(), style="bold" * (number in (-1, table.marked)))
            console.print(line, soft_wrap=True)


def _seconds(seconds: float) -> str:
    if not math.isfinite(seconds):
        return str(seconds)
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


# Columns of arms: the figure and its format.
FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "before": ("before", "{:.3f}".format),
    "final accuracy": ("final_accuracy", "{:.3f}".format),
    "difference": ("difference", "{:+.3f}".format),
    "time to target": ("seconds_to_target", _seconds),
    "times as fast": ("speedup", "{:.2f}".format),
    "training time": ("seconds", _seconds),
    "generated tokens": ("generated_tokens", short),
    "trained tokens": ("trained_tokens", short),
    "peak memory": ("peak_bytes", gib),
}
MEANS = ("seconds", "generated_tokens", "trained_tokens", "peak_bytes")  # over runs, of what these are


def figures(comparison: Comparison) -> list[dict[str, Estimate | None]]:
    """Return the figures of each arm."""
    return [
        {
            "before": estimate(arm.mean_curve.values[:1]),
            "final_accuracy": arm.final_accuracy,
            "difference": arm.less(base) if base else None,
            "seconds_to_target": estimate(arm.reaching(comparison.target), 0.0),
            "speedup": arm.speedup(base, comparison.target) if base else None,
            **{name: arm.mean(name) for name in MEANS},
        }
        for arm, base in zip(comparison.arms, comparison.bases, strict=True)
    ]


def arm_table(comparison: Comparison, by_setting: bool = False) -> Table:
    """Return one row per arm: its label, or a column for each setting, then means over its completed runs. A star marks
    an interval over problems. Columns that are empty are left out; what is the same for all arms is in the title."""
    arms, found = comparison.arms, figures(comparison)
    settings = {key: [shown(arm.settings.get(key, NOTHING)) for arm in arms] for key in comparison.columns}
    named = by_setting and settings or {"arm": [arm.label for arm in arms]}
    cells = {"runs": [str(len(arm.runs)) for arm in arms]}
    for name, (figure, form) in FIGURES.items():
        cells[name] = [_cell(of_arm[figure], form, bare=figure in MEANS) for of_arm in found]
    cells["time to target"] = [_reached(arm, comparison.target) for arm in arms]
    filled = {name: column for name, column in cells.items() if {*column} - {NOTHING}}
    alike = {key: column[0] for key, column in filled.items() if len({*column}) == 1 < len(arms) and "final" not in key}
    columns = named | {name: column for name, column in filled.items() if name not in alike}
    title = f"All arms: {', '.join(f'{name} {cell}' for name, cell in alike.items())}" if alike else ""
    return Table(tuple(columns), tuple(zip(*columns.values(), strict=True)), frozenset(filled), title=title)


def run_table(comparison: Comparison) -> Table:
    """Return one row per run that is not averaged: how it ended, its settings, how far it got, and remarks."""
    rows = []
    for run in comparison.left_out:
        settings = run.recorded.settings
        keys = comparison.columns if run.recorded.known else [key for key in run.recorded.typed if key != "seed"]
        steps = f"{run.steps}/{shown(settings['train.steps'])}" if "train.steps" in settings else str(run.steps)
        what = words(settings, keys), shown(settings.get("seed", NOTHING)), steps
        reached = _cell(estimate([run.final_accuracy]), "{:.3f}".format), _cell(estimate([run.seconds]), _seconds)
        rows.append((run.name, run.state.value, *what, *reached, "; ".join(filter(None, (run.reason, *run.notes)))))
    names = ("seed", "steps", "last accuracy", "training time")
    return Table(("run", "state", "settings", *names, "remarks"), tuple(rows), frozenset(names))


def footnotes(comparison: Comparison) -> list[str]:
    """Return notes below the tables."""
    arms, target = comparison.arms, comparison.target
    averaged = [run for arm in arms for run in arm.runs]
    notes = [
        f"Means over completed runs ({len(averaged)} of {len(averaged) + len(comparison.left_out)}), with Student's "
        f"95% interval over seeds where they differ; accuracy is the held-out {accuracy_label(comparison.metric)}."
    ]
    if any(found["difference"] for found in figures(comparison)):
        notes.append(f"Difference: final accuracy less that of {comparison.base}, mean over the seeds that both have.")
    if any(arm.task != arms[0].task for arm in arms):
        notes.append("Arms of different tasks are not compared with each other.")
    if any(arm.final_accuracy and arm.final_accuracy.over == "problems" for arm in arms):
        notes.append("* One seed, or seeds that agree: the interval is over the held-out problems, not over seeds.")
    if not any(arm.curves for arm in arms):
        notes.append("No completed run was evaluated, so there is no accuracy (eval.every).")
    elif target is not None:
        notes.append(
            f"Time to target: an accuracy of {target:.3f} ({comparison.target_is}); training seconds up to the first "
            "evaluation that reaches it, mean over the runs that get there"
            + "; times as fast: geometric mean over the seeds with which both do"
            * any(found["speedup"] for found in figures(comparison))
            + "."
        )
    codes = Counter(", ".join(f"{name} {version}" for name, version in run.code.items()) for run in averaged)
    if len(codes) > 1:
        each = "; ".join(f"{code or 'not recorded'} ({number} of {codes.total()})" for code, number in codes.items())
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
        "target_is": comparison.target_is,
        "base": comparison.base,
        "arms": [
            {"arm": arm.label, "settings": arm.settings}
            | {name: found and asdict(found) for name, found in of_arm.items()}
            | {"runs": [*map(_run_json, arm.runs)], "not_averaged": [*map(_run_json, arm.others)]}
            for arm, of_arm in zip(comparison.arms, figures(comparison), strict=True)
        ],
        "without_settings": [*map(_run_json, comparison.unknown)],
    }


def _run_json(run: Run) -> dict[str, Any]:
    names = ("folder", "reason", "notes", "steps", "code", *MEANS)
    facts = {"state": run.state.value, "seed": run.recorded.seed, "overrides": [*run.recorded.typed]}
    return {**{name: getattr(run, name) for name in names}, **facts, "curve": asdict(run.curve)}


def _cell(found: Estimate | None, form: Callable[[float], str], bare: bool = False) -> str:
    if found is None:
        return NOTHING
    ends = f" [{form(found.low)}, {form(found.high)}]" + "*" * (found.over == "problems")
    return form(found.mean) + ends * (found.over != "" and not bare)


def _reached(arm: Arm, target: float | None) -> str:
    seconds, runs = arm.reaching(target), len(arm.curves)
    if not seconds:
        return "never" if runs and target is not None else NOTHING
    return _seconds(statistics.fmean(seconds)) + (f" ({len(seconds)} of {runs})" if len(seconds) < runs else "")


# Columns of evaluations: what they show of a summary. An accuracy comes with its 95% interval over problems.
_ACCURACIES = {"search": "search/accuracy", "greedy": "eval/accuracy", "sampled": "eval/pass@1"}
_TOKENS = {"tokens": "search/tokens", "one after another": "search/sequential", "tokens of a reply": "eval/length_mean"}


def show_evaluations(evaluations: Sequence[tuple[str, Path]]) -> None:
    """Print a table of evaluations, given as (name, folder)."""
    found = [(name, read_object(folder / SUMMARY)) for name, folder in evaluations]
    names = _ACCURACIES | _TOKENS
    columns = [word for word, name in names.items() if any(is_a(float, summary.get(name)) for _, summary in found)]
    rows = tuple((name, *(_result(summary, names[word]) for word in columns)) for name, summary in found)
    print_table(terminal.console(), Table(("evaluation", *columns), rows, frozenset(columns)))


def _result(summary: Mapping[str, Any], name: str) -> str:
    value, low, high = (summary.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    if not is_a(float, value):
        return NOTHING
    if name in _TOKENS.values():
        return f"{value:,.0f}"
    return f"{value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if is_a(float, low) and is_a(float, high) else "")


def show_profiles(profiles: Sequence[tuple[str, Path]]) -> None:
    """Print a table of the profiles of finished jobs, given as (overrides, folder): measured if they are, else
    predicted."""
    rows = []
    for name, folder in profiles:
        found = read_object(folder / PROFILE)
        measured, peak, figures = found["measured"], (found["measured"] or found["predicted"])["peak"], [NOTHING] * 4
        if measured is not None:
            phases, engine = measured["phases"], measured["engine"]
            speed = phases.get("decode", {}).get("tokens_per_second")  # one token needs no decode step
            figures = [f"{phases['step']['seconds_median']:.2f}", f"{speed:,.0f}" if speed else NOTHING]
            figures += [f"{engine['engine/slot_utilisation']:.0%}", gib(engine["engine/kv_peak_bytes"])]
        rows.append((name, *figures, gib(peak["bytes"]), peak["phase"]))
    columns = ("job", "s/step", "tokens/s", "slots busy", "KV cache", "peak", "peak in")
    print_table(terminal.console(), Table(columns, tuple(rows), frozenset(columns[1:6])))
