"""The findings of a profile, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from grpo_cli.memory.explain import breakdown
from grpo_cli.memory.plan import MemoryPlan
from grpo_cli.report.tables import Table, print_table
from grpo_cli.support.formatting import gib

MOST = 1024  # rollouts per prompt: the search for the largest group that fits stops here
_COLUMNS = ("phase", "seconds", "", "share", "tokens/s", "peak", "predicted", "ratio")
_SLOTS = "rollouts: {decode_steps:.0f} decode steps in {slots:.0f} slots, {slot_utilisation:.0%} of them busy"


def show(console: Console, found: Mapping[str, Any], plan: MemoryPlan) -> None:
    """Print the content of a `profile.json`: the measured phases, what holds memory, and what fits."""
    lines, fit = [f"Not planned: {note}." for note in found["not_predicted"]], found["fit"]
    if (measured := found["measured"]) is not None:
        print_table(console, _phases(measured["phases"], plan))
        figures = {name.removeprefix("engine/"): value for name, value in measured["engine"].items()}
        lines.append(f"{_SLOTS.format(**figures)}; KV cache {gib(figures['kv_peak_bytes'])}")
    verdict, largest = "fits in" if fit["fits"] else "does not fit in", fit["largest_n"] or "none"
    lines += breakdown(plan, plan.fullest)
    lines.append(
        f"{gib(plan.peak)} {verdict} {gib(fit['room_bytes'])}; the largest n that fits: {largest}"
        f"{' or more' * (largest == MOST)}."
    )
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _phases(measured: Mapping[str, Any], plan: MemoryPlan) -> Table:
    step = measured["step"]["seconds_median"]
    rows = []
    for name, phase in measured.items():
        expected, peak = plan.bytes_of(name) if name in plan.phases else 0, phase["peak_bytes"]
        row = (
            name,
            f"{phase['seconds_median']:.3f}",
            f"± {(phase['seconds_most'] - phase['seconds_least']) / 2:.3f}" if phase["times"] > 1 else "",
            "" if name == "eval" else f"{phase['seconds_median'] / step:.0%}",
            "" if phase["tokens_per_second"] is None else f"{phase['tokens_per_second']:,.0f}",
            gib(peak) if peak else "",
            gib(expected) if expected else "",
            f"{expected / peak:.2f}" if expected and peak else "",
        )
        rows.append(row)
    title = "a step, phase by phase (median and half the range of the measured steps)"
    return Table(_COLUMNS, tuple(rows), frozenset(_COLUMNS[1:]), list(measured).index("step"), title)
