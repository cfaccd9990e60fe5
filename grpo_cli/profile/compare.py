"""A sweep's profiles side by side: a table with ratios to the first one, and a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from grpo_cli.profile.estimate import KINDS
from grpo_cli.profile.findings import read
from grpo_cli.runs import layout
from grpo_cli.runs.files import json_line, write_atomically
from grpo_cli.support import terminal
from grpo_cli.support.formatting import gib

# Okabe and Ito's colours, which the colour-blind tell apart.
_COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#8C6D31", "#BBBBBB")


@dataclass(frozen=True)
class ProfileRow:
    """One profile of a sweep. What was not measured, because only a plan was wanted, is None."""

    name: str
    step_seconds: float | None
    decode_steps: float | None
    tokens_per_second: float | None
    slot_utilisation: float | None
    kv_bytes: int
    peak_bytes: int
    peak_phase: str
    held_by: Mapping[str, int]


def row(name: str, found: Mapping[str, Any]) -> ProfileRow:
    """What is compared of a `profile.json`: measured where it was measured, else predicted."""
    measured, predicted = found["measured"], found["predicted"]
    if measured is None:
        peak = predicted["peak"]
        held_by = predicted["phases"][peak["phase"]]["held_by"]
        kv = predicted["phases"]["decode"]["held_by"]["kv"]
        return ProfileRow(name, None, None, None, None, kv, peak["bytes"], peak["phase"], held_by)
    engine, peak = measured["engine"], measured["peak"]
    return ProfileRow(
        name,
        measured["phases"]["step"]["seconds_median"],
        engine["engine/decode_steps"],
        measured["phases"]["decode"]["tokens_per_second"],
        engine["engine/slot_utilisation"],
        int(engine["engine/kv_peak_bytes"]),
        peak["bytes"],
        peak["phase"],
        peak["held_by"],
    )


def rows_of(jobs: Sequence[tuple[str, Path]]) -> list[ProfileRow]:
    """The rows of finished jobs: their overrides and their folders."""
    return [row(name, read(folder / layout.PROFILE)) for name, folder in jobs]


def compare(jobs: Sequence[tuple[str, Path]], folder: Path) -> None:
    """Show the finished jobs' table, and write it as JSON and, where matplotlib is installed, as a picture."""
    console, rows = terminal.console(), rows_of(jobs)
    console.print(table(rows))
    text = json_line([asdict(line) for line in rows], indent=2)
    write_atomically(folder / layout.COMPARISON, f"{text}\n".encode())
    written = layout.COMPARISON
    if can_draw():
        draw(rows, folder / layout.COMPARISON_PICTURE)
        written = f"{layout.COMPARISON} and {layout.COMPARISON_PICTURE}"
    else:
        console.print("no picture: matplotlib is not installed; pip install 'grpo-cli[plot]'", markup=False)
    console.print(f"{written}: {folder}", highlight=False, soft_wrap=True)


def table(rows: Sequence[ProfileRow]) -> Table:
    """One line per profile; in brackets the ratio to the first one."""
    result = Table(title="profiles, and in brackets their ratio to the first", title_justify="left")
    columns: dict[str, Callable[[ProfileRow], tuple[float | None, str]]] = {
        "s/step": lambda r: (r.step_seconds, f"{r.step_seconds or 0:.2f}"),
        "decode steps": lambda r: (r.decode_steps, f"{r.decode_steps or 0:.0f}"),
        "tokens/s": lambda r: (r.tokens_per_second, f"{r.tokens_per_second or 0:,.0f}"),
        "slots busy": lambda r: (r.slot_utilisation, f"{r.slot_utilisation or 0:.0%}"),
        "KV": lambda r: (r.kv_bytes, gib(r.kv_bytes)),
        "peak": lambda r: (r.peak_bytes, gib(r.peak_bytes)),
    }
    result.add_column("job")
    for name in columns:
        result.add_column(name, justify="right")
    result.add_column("peak in")
    for line in rows:
        cells = []
        for look in columns.values():
            value, text = look(line)
            first, _ = look(rows[0])
            cells.append("" if value is None else text if not first else f"{text}\n({value / first:.2f})")
        result.add_row(line.name.replace(" ", "\n"), *cells, line.peak_phase)
    return result


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(rows: Sequence[ProfileRow], path: Path) -> None:
    """What the peak of each profile is held by, and how fast it decodes. Needs matplotlib (the extra `plot`)."""
    from matplotlib.figure import Figure  # the figure's own canvas: no global state, no display

    measured = all(line.tokens_per_second is not None for line in rows)
    figure = Figure(figsize=(9 if measured else 6, 1.2 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots(1, 2 if measured else 1, sharey=True, squeeze=False)[0]
    names, places = [line.name or "as configured" for line in rows], range(len(rows))
    left = [0.0] * len(rows)
    unit = 2**30 if max(line.peak_bytes for line in rows) >= 2**30 else 2**20
    for kind, colour in zip(KINDS, _COLOURS, strict=True):
        sizes = [max(0, line.held_by.get(kind, 0)) / unit for line in rows]
        if any(sizes):
            axes[0].barh(places, sizes, left=left, color=colour, label=kind)
            left = [before + size for before, size in zip(left, sizes, strict=True)]
    axes[0].set_xlabel(f"peak memory, {'GiB' if unit == 2**30 else 'MiB'}")
    axes[0].set_yticks(places, names)
    axes[0].invert_yaxis()
    if measured:
        axes[1].barh(places, [line.tokens_per_second or 0.0 for line in rows], color=_COLOURS[0])
        axes[1].set_xlabel("tokens decoded per second")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    figure.legend(loc="outside upper center", ncols=len(KINDS), fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
