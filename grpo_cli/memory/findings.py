"""The findings of a profile: as `profile.json`, and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from grpo_cli.memory.explain import breakdown
from grpo_cli.memory.measure import Measured
from grpo_cli.memory.plan import KINDS, MemoryPlan
from grpo_cli.report.profiles import SCHEMA
from grpo_cli.report.tables import Table, print_table
from grpo_cli.support.formatting import gib

MOST = 1024  # rollouts per prompt: the search for the largest group that fits stops here
_COLUMNS = ("phase", "seconds", "", "share", "tokens/s", "peak", "predicted", "ratio")


@dataclass(frozen=True)
class Findings:
    """`measured` is None for a plan. `predicted` is for rollouts of full length, and leaves out `not_predicted`;
    `largest_n`, at most `MOST`, then fits `room` bytes (None: not even 1 does)."""

    about: Mapping[str, Any]  # command, device, threads, versions, settings
    measured: Measured | None
    predicted: MemoryPlan
    room: int
    largest_n: int | None
    not_predicted: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The peak: measured, else predicted."""
        return self.predicted.peak if self.measured is None else self.measured.phases[self.measured.fullest].peak_bytes

    @property
    def document(self) -> dict[str, Any]:
        """The findings as plain values, in seconds and bytes; every file has every key."""
        plan, measured = self.predicted, None
        if self.measured is not None:
            measured = asdict(self.measured) | {"peak": {"phase": self.measured.fullest, "bytes": self.peak_bytes}}
        phases = {
            name: {"bytes": plan.bytes_of(name), "held_by": {kind: sizes.get(kind, 0) for kind in KINDS}}
            for name, sizes in plan.phases.items()
        }
        return {
            "schema": SCHEMA,
            **self.about,
            "measured": measured,
            "predicted": {"phases": phases, "peak": {"phase": plan.fullest, "bytes": plan.peak}},
            "not_predicted": list(self.not_predicted),
            "fit": {"room_bytes": self.room, "fits": plan.peak <= self.room, "largest_n": self.largest_n},
        }

    def show(self, console: Console) -> None:
        """Print the measured phases, what holds memory, and what fits."""
        lines = [f"Not planned: {note}." for note in self.not_predicted]
        if self.measured is not None:
            print_table(console, _phases(self.measured, self.predicted))
            figures = {name.removeprefix("engine/"): value for name, value in self.measured.engine.items()}
            in_slots = (
                "rollouts: {decode_steps:.0f} decode steps in {slots:.0f} slots, {slot_utilisation:.0%} of them busy"
            )
            lines.append(f"{in_slots.format(**figures)}; KV cache {gib(int(figures['kv_peak_bytes']))}")
        verdict = "fits in" if self.predicted.peak <= self.room else "does not fit in"
        largest = "none" if self.largest_n is None else f"{self.largest_n}{' or more' * (self.largest_n == MOST)}"
        lines += breakdown(self.predicted, self.predicted.fullest)
        lines.append(f"{gib(self.predicted.peak)} {verdict} {gib(self.room)}; the largest n that fits: {largest}.")
        for line in lines:
            console.print(line, highlight=False, markup=False)


def _phases(measured: Measured, predicted: MemoryPlan) -> Table:
    step = measured.phases["step"].seconds_median
    rows = []
    for name, phase in measured.phases.items():
        expected, peak = predicted.bytes_of(name) if name in predicted.phases else 0, phase.peak_bytes
        row = (
            name,
            f"{phase.seconds_median:.3f}",
            f"± {(phase.seconds_most - phase.seconds_least) / 2:.3f}" if phase.times > 1 else "",
            "" if name == "eval" else f"{phase.seconds_median / step:.0%}",
            "" if phase.tokens_per_second is None else f"{phase.tokens_per_second:,.0f}",
            gib(peak) if peak else "",
            gib(expected) if expected else "",
            f"{expected / peak:.2f}" if expected and peak else "",
        )
        rows.append(row)
    title = "a step, phase by phase (median and half the range of the measured steps)"
    return Table(_COLUMNS, tuple(rows), frozenset(_COLUMNS[1:]), list(measured.phases).index("step"), title)
