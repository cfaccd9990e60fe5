"""Evaluations, and the profiles of a sweep, side by side: a row for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.report.tables import NOTHING, Table, print_table
from grpo_cli.runs.files import read_object
from grpo_cli.runs.layout import PROFILE, SUMMARY
from grpo_cli.support import terminal
from grpo_cli.support.formatting import gib, is_a

# Columns: what they show of a summary. An accuracy comes with its 95% interval over problems.
_ACCURACIES = {"search": "search/accuracy", "greedy": "eval/accuracy", "sampled": "eval/pass@1"}
_TOKENS = {"tokens": "search/tokens", "one after another": "search/sequential", "tokens of a reply": "eval/length_mean"}


def show_evaluations(evaluations: Sequence[tuple[str, Path]]) -> None:
    """Print a table of evaluations, given as (name, folder)."""
    found = [(name, read_object(folder / SUMMARY)) for name, folder in evaluations]
    names = _ACCURACIES | _TOKENS
    columns = [word for word, name in names.items() if any(is_a(float, summary.get(name)) for _, summary in found)]
    rows = tuple((name, *(_cell(summary, names[word]) for word in columns)) for name, summary in found)
    print_table(terminal.console(), Table(("evaluation", *columns), rows, frozenset(columns)))


def _cell(summary: Mapping[str, Any], name: str) -> str:
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
