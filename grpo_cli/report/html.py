"""Compared runs as one self-contained HTML file: pictures are inlined, scripts and external addresses forbidden."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from grpo_cli import __version__
from grpo_cli.report.compare import Comparison
from grpo_cli.report.plots import DPI
from grpo_cli.report.rollouts import Recording, extremes, facts, visible
from grpo_cli.report.tables import REMARKS, SET_APART, SPARKS, Table, arm_table, footnotes, run_table, settings_table
from grpo_cli.support.formatting import plain

TEMPLATE = Path(__file__).with_name("page.html.jinja")
SHOWN = 2  # rollouts of each run with the highest rewards, and as many with the lowest
LONGEST = 4000  # characters of a text that are shown
PIXELS_PER_INCH = 115  # of the browser: text in pictures is then about the size of the text around them
CAPTIONS = {
    "accuracy.png": (
        "Accuracy along the runs",
        "Held-out accuracy against training seconds (evaluation left out), generated tokens and steps: mean "
        "over seeds, and a band of one standard deviation where there are several. Dotted: runs that are not averaged.",
    ),
    "memory.png": ("Peak memory", "Mean over seeds; dots are single runs."),
    "step_time.png": ("Where a step's time goes", "Mean seconds per step by phase, over all steps and seeds."),
}


def page(
    comparison: Comparison,
    pictures: Mapping[str, bytes],
    notes: Sequence[str],
    made: str,
    recorded: Sequence[tuple[str, Recording]],
) -> str:
    """The whole report. `made` is when; `notes` what it lacks; `recorded` has rollouts with their runs' names."""
    settings = not comparison.numbered
    # Everything inserted is escaped: it comes from files of runs.
    template = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return template.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        **{"kind": _kind, "plain": plain, "facts": facts, "readable": _readable, "version": __version__, "made": made},
        runs=comparison.runs,
        num_arms=len(comparison.arms),
        notes=notes,
        arms=arm_table(comparison, intervals=True, settings=settings),
        footnotes=footnotes(comparison),
        settings=settings_table(comparison) if comparison.numbered else None,
        pictures=[_picture(name, data) for name, data in pictures.items()],
        left_out=run_table(comparison, comparison.left_out, settings),
        all_runs=run_table(comparison, comparison.runs, settings),
        recorded=[(name, found, extremes(found.rollouts, SHOWN, SHOWN)) for name, found in recorded],
    )


def _kind(table: Table, column: str) -> str:
    """The CSS class of a column's cells."""
    special = {REMARKS: "words", SET_APART: "words", SPARKS: "spark"}
    return "number" if column in table.numeric else special.get(column, "")


def _readable(text: str) -> str:
    more = f" [and {len(text) - LONGEST} more characters]" if len(text) > LONGEST else ""
    return visible(text[:LONGEST]) + more


def _picture(name: str, data: bytes) -> dict[str, str | int]:
    """A PNG for the page, at its intended width; its header has the pixels."""
    title, caption = CAPTIONS[name]
    width = round(int.from_bytes(data[16:20]) / DPI * PIXELS_PER_INCH)
    return {"title": title, "caption": caption, "width": width, "data": base64.b64encode(data).decode()}
