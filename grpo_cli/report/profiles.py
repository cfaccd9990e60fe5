"""The profiles of a sweep side by side: a table with ratios to the first one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_cli.report.show import print_table
from grpo_cli.report.tables import Table
from grpo_cli.runs import layout
from grpo_cli.runs.files import json_line, write_atomically
from grpo_cli.support import terminal
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib

SCHEMA = 1  # of `profile.json`


@dataclass(frozen=True)
class ProfileRow:
    """One profile of a sweep. What was not measured (`profile.plan_only`) is None."""

    name: str
    step_seconds: float | None
    decode_steps: float | None
    tokens_per_second: float | None
    slot_utilisation: float | None
    kv_bytes: int
    peak_bytes: int
    peak_phase: str


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
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a {layout.PROFILE} that grpo profile wrote") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{path} has schema {schema}, but this version reads {SCHEMA}: profile it again")
    return dict(found)


def profile_row(name: str, found: Mapping[str, Any]) -> ProfileRow:
    """Return the figures of a `profile.json` that are compared: measured if there are any, else predicted."""
    measured, predicted = found["measured"], found["predicted"]
    if measured is None:
        peak, phases = predicted["peak"], predicted["phases"]
        kv = phases["decode"]["held_by"]["kv"] if "decode" in phases else 0  # engine=torch only
        return ProfileRow(name, None, None, None, None, kv, peak["bytes"], peak["phase"])
    engine, peak, phases = measured["engine"], measured["peak"], measured["phases"]
    seconds, speed = phases["step"]["seconds_median"], phases["decode"]["tokens_per_second"]
    steps, busy, kv = (engine[f"engine/{name}"] for name in ("decode_steps", "slot_utilisation", "kv_peak_bytes"))
    return ProfileRow(name, seconds, steps, speed, busy, int(kv), peak["bytes"], peak["phase"])


def compare_profiles(jobs: Sequence[tuple[str, Path]], folder: Path, console: Console | None = None) -> None:
    """Show the profiles of finished jobs, given as (overrides, folder), and write them to `folder` as JSON."""
    console = console or terminal.console()
    rows = [profile_row(name, read_profile(job / layout.PROFILE)) for name, job in jobs]
    print_table(console, profile_table(rows))
    write_atomically(folder / layout.COMPARISON, f"{json_line([asdict(row) for row in rows], indent=2)}\n".encode())
    console.print(f"{layout.COMPARISON}: {folder}", highlight=False, soft_wrap=True)


def profile_table(rows: Sequence[ProfileRow]) -> Table:
    """Return one row per profile, with the ratio to the first one in parentheses."""

    def cell(row: ProfileRow, figure: str, form: Callable[[Any], str]) -> str:
        value, first = getattr(row, figure), getattr(rows[0], figure)
        if value is None:
            return ""
        return f"{form(value)} ({value / first:.2f})" if first else form(value)

    cells = [(row.name, *(cell(row, *column) for column in _COLUMNS.values()), row.peak_phase) for row in rows]
    title = "profiles, and in parentheses their ratio to the first"
    return Table(("job", *_COLUMNS, "peak in"), tuple(cells), frozenset(_COLUMNS), title=title)
