"""The profiles of a sweep side by side: a table with ratios to the first one, and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_cli.report import plots
from grpo_cli.report.show import print_table
from grpo_cli.report.tables import Table
from grpo_cli.runs import layout
from grpo_cli.runs.files import json_line, write_atomically
from grpo_cli.support import terminal
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib, size

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
    held_by: Mapping[str, int]


_COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "s/step": ("step_seconds", "{:.2f}".format),
    "decode steps": ("decode_steps", "{:.0f}".format),
    "tokens/s": ("tokens_per_second", "{:,.0f}".format),
    "slots busy": ("slot_utilisation", "{:.0%}".format),
    "KV": ("kv_bytes", gib),
    "peak": ("peak_bytes", gib),
}


def read_profile(path: Path) -> dict[str, Any]:
    """The content of a `profile.json`. UserError if it is something else or has another schema."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a {layout.PROFILE} that grpo profile wrote") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{path} has schema {schema}, but this version reads {SCHEMA}: profile it again")
    return dict(found)


def profile_row(name: str, found: Mapping[str, Any]) -> ProfileRow:
    """The figures of a `profile.json` that are compared: measured if there are any, else predicted."""
    measured, predicted = found["measured"], found["predicted"]
    if measured is None:
        peak, phases = predicted["peak"], predicted["phases"]
        kv = phases["decode"]["held_by"]["kv"] if "decode" in phases else 0  # engine=torch only
        held_by = phases[peak["phase"]]["held_by"]
        return ProfileRow(name, None, None, None, None, kv, peak["bytes"], peak["phase"], held_by)
    engine, peak, phases = measured["engine"], measured["peak"], measured["phases"]
    seconds, speed = phases["step"]["seconds_median"], phases["decode"]["tokens_per_second"]
    steps, busy, kv = (engine[f"engine/{name}"] for name in ("decode_steps", "slot_utilisation", "kv_peak_bytes"))
    return ProfileRow(name, seconds, steps, speed, busy, int(kv), peak["bytes"], peak["phase"], peak["held_by"])


def compare_profiles(jobs: Sequence[tuple[str, Path]], folder: Path, console: Console | None = None) -> None:
    """Show the profiles of finished jobs, given as (overrides, folder), and write them to `folder` as JSON and, if
    matplotlib is installed, as a picture."""
    console = console or terminal.console()
    rows = [profile_row(name, read_profile(job / layout.PROFILE)) for name, job in jobs]
    print_table(console, profile_table(rows))
    written = {layout.COMPARISON: f"{json_line([asdict(row) for row in rows], indent=2)}\n".encode()}
    if plots.can_draw():
        written[layout.COMPARISON_PICTURE] = profile_picture({row.name or "as configured": row for row in rows})
    else:
        console.print(plots.NO_PICTURES, markup=False, highlight=False)
    for name, data in written.items():
        write_atomically(folder / name, data)
    console.print(f"{' and '.join(written)}: {folder}", highlight=False, soft_wrap=True)


def profile_table(rows: Sequence[ProfileRow]) -> Table:
    """One row per profile, with the ratio to the first one in parentheses."""

    def cell(row: ProfileRow, figure: str, form: Callable[[Any], str]) -> str:
        value, first = getattr(row, figure), getattr(rows[0], figure)
        if value is None:
            return ""
        return f"{form(value)} ({value / first:.2f})" if first else form(value)

    cells = [(row.name, *(cell(row, *column) for column in _COLUMNS.values()), row.peak_phase) for row in rows]
    title = "profiles, and in parentheses their ratio to the first"
    return Table(("job", *_COLUMNS, "peak in"), tuple(cells), frozenset(_COLUMNS), title=title)


def profile_picture(rows: Mapping[str, ProfileRow]) -> bytes:
    """A PNG of what holds memory at each profile's peak and, if all were measured, of their decoding speeds."""
    with plots.paper_style():
        speeds = [row.tokens_per_second for row in rows.values() if row.tokens_per_second is not None]
        captions = ["peak memory, MiB", *(["tokens decoded per second"] if len(speeds) == len(rows) else [])]
        rows, figure, panels = plots.bars(rows, *captions)
        held = [{kind: max(0, size) / 2**20 for kind, size in row.held_by.items()} for row in rows.values()]
        kinds = [kind for kind in held[0] if kind != "other"]
        plots.stacked(figure, panels[0], held, {**dict(zip(kinds, plots.COLOURS, strict=False)), "other": plots.GREY})
        for place, row in enumerate(rows.values()):
            plots.write_at_end(panels[0], size(row.peak_bytes), sum(held[place].values()), place)
        for panel in panels[1:]:
            panel.barh(range(len(rows)), speeds[: len(rows)], color=plots.COLOURS[0], height=0.62)
        return plots.png(figure)
