"""Evaluations, and the profiles of a sweep, side by side: a row for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.report.compare import differences
from grpo_cli.report.read import Run
from grpo_cli.report.tables import NOTHING, Table, print_table
from grpo_cli.runs.files import read_object
from grpo_cli.runs.layout import PROFILE, SUMMARY
from grpo_cli.support import terminal
from grpo_cli.support.formatting import gib, is_a, shown

# Columns: what they show of a summary. An accuracy comes with its 95 % interval over problems.
_ACCURACIES = {"search": "search/accuracy", "greedy": "eval/accuracy", "sampled": "eval/pass@1"}
_TOKENS = {"tokens": "search/tokens", "one after another": "search/sequential", "tokens of a reply": "eval/length_mean"}
# Columns: a figure of a profile, and its format.
_FIGURES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "s/step": ("step_seconds", "{:.2f}".format),
    "decode steps": ("decode_steps", "{:.0f}".format),
    "tokens/s": ("tokens_per_second", "{:,.0f}".format),
    "slots busy": ("slot_utilisation", "{:.0%}".format),
    "KV": ("kv_bytes", gib),
    "peak": ("peak_bytes", gib),
}


def show_evaluations(evaluations: Sequence[tuple[str, Path]]) -> None:
    """Print a table of evaluations, given as (name, folder)."""
    found = [(name, read_object(folder / SUMMARY)) for name, folder in evaluations]
    names = _ACCURACIES | _TOKENS
    columns = [word for word, name in names.items() if any(is_a(float, summary.get(name)) for _, summary in found)]
    rows = tuple((name, *(_cell(summary, names[word]) for word in columns)) for name, summary in found)
    print_table(terminal.console(), Table(("evaluation", *columns), rows, frozenset(columns)))


def labelled(runs: Sequence[Run]) -> list[tuple[str, Path]]:
    """Return the folder of each evaluation after what differs in its settings, or after its name where nothing does."""
    columns, _ = differences([run.recorded for run in runs])
    words = [
        [f"{key}={shown(run.recorded.settings[key])}" for key in columns if key in run.recorded.settings]
        for run in runs
    ]
    return [(" ".join(typed) or run.name, run.folder) for typed, run in zip(words, runs, strict=True)]


def _cell(summary: Mapping[str, Any], name: str) -> str:
    value, low, high = (summary.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    if not is_a(float, value):
        return NOTHING
    if name in _TOKENS.values():
        return f"{value:,.0f}"
    return f"{value:.3f}" + (f" ({low:.3f}–{high:.3f})" if is_a(float, low) and is_a(float, high) else "")


def show_profiles(profiles: Sequence[tuple[str, Path]]) -> None:
    """Print a table of the profiles of finished jobs, given as (overrides, folder)."""
    rows = [profile_row(name, read_object(folder / PROFILE)) for name, folder in profiles]
    print_table(terminal.console(), profile_table(rows))


def profile_row(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a `profile.json` that are compared: measured if there are any, else predicted."""
    measured, predicted = found["measured"], found["predicted"]
    peak = (measured or predicted)["peak"]
    figures: dict[str, Any] = {"name": name, "peak_bytes": peak["bytes"], "peak_phase": peak["phase"]}
    if measured is None:  # keys and values are planned for engine=torch only
        return figures | {"kv_bytes": predicted["phases"].get("decode", {"held_by": {"kv": 0}})["held_by"]["kv"]}
    phases, engine = measured["phases"], measured["engine"]
    figures |= {name: engine[f"engine/{name}"] for name in ("decode_steps", "slot_utilisation")}
    figures |= {"step_seconds": phases["step"]["seconds_median"], "kv_bytes": int(engine["engine/kv_peak_bytes"])}
    return figures | {"tokens_per_second": phases["decode"]["tokens_per_second"]}


def profile_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return one row per profile, with the ratio to the first one in parentheses. What was not measured is empty."""

    def cell(row: Mapping[str, Any], figure: str, form: Callable[[Any], str]) -> str:
        if figure not in row:
            return ""
        first = rows[0].get(figure)
        return f"{form(row[figure])} ({row[figure] / first:.2f})" if first else form(row[figure])

    cells = [(row["name"], *(cell(row, *column) for column in _FIGURES.values()), row["peak_phase"]) for row in rows]
    title = "profiles, and in parentheses their ratio to the first"
    return Table(("job", *_FIGURES, "peak in"), tuple(cells), frozenset(_FIGURES), title=title)
