"""Evaluations side by side: what each answered rightly, and for how many tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_cli.report.compare import differences
from grpo_cli.report.read import Run
from grpo_cli.report.show import print_table
from grpo_cli.report.tables import NOTHING, Table
from grpo_cli.runs import layout
from grpo_cli.runs.summary import read_object
from grpo_cli.support import terminal
from grpo_cli.support.formatting import shown

# Columns: what they show of a summary. An accuracy comes with its 95 % interval over problems.
_ACCURACIES = {"search": "search/accuracy", "greedy": "eval/accuracy", "sampled": "eval/pass@1"}
_TOKENS = {"tokens": "search/tokens", "one after another": "search/sequential", "tokens of a reply": "eval/length_mean"}


def headline(summary: Mapping[str, Any]) -> str:
    """Return an evaluation's first accuracy, in a word or two."""
    return next((f"{word} {summary[name]:.3f}" for word, name in _ACCURACIES.items() if _is_there(summary, name)), "")


def show_evaluations(evaluations: Sequence[tuple[str, Path]], console: Console | None = None) -> None:
    """Print a table of evaluations, given as (name, folder)."""
    found = [(name, read_object(folder / layout.SUMMARY)) for name, folder in evaluations]
    kinds = {**dict.fromkeys(_ACCURACIES, _accuracy), **dict.fromkeys(_TOKENS, _tokens)}
    names = _ACCURACIES | _TOKENS
    columns = [word for word, name in names.items() if any(_is_there(summary, name) for _, summary in found)]
    rows = tuple((name, *(kinds[word](summary, names[word]) for word in columns)) for name, summary in found)
    print_table(console or terminal.console(), Table(("evaluation", *columns), rows, frozenset(columns)))


def named(runs: Sequence[Run]) -> list[tuple[str, Path]]:
    """Return evaluations by what differs in how they were asked for, or by their folders where nothing does."""
    columns, _ = differences([run.asked for run in runs])
    words = [
        [f"{key}={shown(run.asked.settings[key])}" for key in columns if key in run.asked.settings] for run in runs
    ]
    return [(" ".join(asked) or run.name, run.folder) for asked, run in zip(words, runs, strict=True)]


def _is_there(summary: Mapping[str, Any], name: str) -> bool:
    return isinstance(summary.get(name), int | float)


def _accuracy(summary: Mapping[str, Any], name: str) -> str:
    ends = [f"{name}_low", f"{name}_high"]
    if not _is_there(summary, name):
        return NOTHING
    interval = "–".join(f"{summary[end]:.3f}" for end in ends if _is_there(summary, end))
    return f"{summary[name]:.3f}" + f" ({interval})" * bool(interval)


def _tokens(summary: Mapping[str, Any], name: str) -> str:
    return f"{summary[name]:,.0f}" if _is_there(summary, name) else NOTHING
