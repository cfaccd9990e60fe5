"""The profiles of a sweep side by side: a table with ratios to the first one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_cli.report.tables import Table, print_table
from grpo_cli.runs import layout
from grpo_cli.runs.files import json_line, read_object, write_atomically
from grpo_cli.support import terminal
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib

SCHEMA = 1  # of `profile.json`
_COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "s/step": ("step_seconds", "{:.2f}".format),
    "decode steps": ("decode_steps", "{:.0f}".format),
    "tokens/s": ("tokens_per_second", "{:,.0f}".format),
    "slots busy": ("slot_utilisation", "{:.0%}".format),
    "KV": ("kv_bytes", gib),
    "peak": ("peak_bytes", gib),
}


def read_profile(path: Path) -> dict[str, Any]:
    """Return the content of a `profile.json`. UserError if it is something else or has another schema."""
    found = read_object(path)
    if (schema := found.get("schema")) != SCHEMA:
        raise UserError(f"{path} has schema {schema}, but this version reads {SCHEMA}: profile it again")
    return found


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


def compare_profiles(jobs: Sequence[tuple[str, Path]], folder: Path, console: Console | None = None) -> None:
    """Show the profiles of finished jobs, given as (overrides, folder), and write them to `folder` as JSON."""
    console = console or terminal.console()
    rows = [profile_row(name, read_profile(job / layout.PROFILE)) for name, job in jobs]
    print_table(console, profile_table(rows))
    write_atomically(folder / layout.COMPARISON, f"{json_line(rows, indent=2)}\n".encode())
    console.print(f"{layout.COMPARISON}: {folder}", highlight=False, soft_wrap=True)


def profile_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return one row per profile, with the ratio to the first one in parentheses. What was not measured is empty."""

    def cell(row: Mapping[str, Any], figure: str, form: Callable[[Any], str]) -> str:
        if figure not in row:
            return ""
        first = rows[0].get(figure)
        return f"{form(row[figure])} ({row[figure] / first:.2f})" if first else form(row[figure])

    cells = [(row["name"], *(cell(row, *column) for column in _COLUMNS.values()), row["peak_phase"]) for row in rows]
    title = "profiles, and in parentheses their ratio to the first"
    return Table(("job", *_COLUMNS, "peak in"), tuple(cells), frozenset(_COLUMNS), title=title)
