"""The findings of a profile: as `profile.json`, and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from grpo_cli.memory.explain import breakdown
from grpo_cli.memory.measure import PHASES, Measured
from grpo_cli.memory.plan import KINDS, MemoryPlan
from grpo_cli.report.profiles import SCHEMA
from grpo_cli.report.tables import Table, print_table
from grpo_cli.support.formatting import gib

MOST = 1024  # rollouts per prompt: the search for the largest group that fits stops here


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
        if self.measured is not None:
            print_table(console, _phases(self.measured, self.predicted))
            engine = self.measured.engine
            steps, slots, busy = (engine[f"engine/{name}"] for name in ("decode_steps", "slots", "slot_utilisation"))
            kept = gib(int(engine["engine/kv_peak_bytes"]))
            line = f"rollouts: {steps:.0f} decode steps in {slots:.0f} slots, {busy:.0%} of them busy; KV cache {kept}"
            console.print(line, highlight=False)
        verdict = "fits in" if self.predicted.peak <= self.room else "does not fit in"
        largest = "none" if self.largest_n is None else f"{self.largest_n}{' or more' * (self.largest_n == MOST)}"
        for line in (
            *(f"Not planned: {note}." for note in self.not_predicted),
            *breakdown(self.predicted, self.predicted.fullest),
            f"{gib(self.predicted.peak)} {verdict} {gib(self.room)}; the largest n that fits: {largest}.",
        ):
            console.print(line, highlight=False, markup=False)


def _phases(measured: Measured, predicted: MemoryPlan) -> Table:
    names = [name for name in (*PHASES[:-1], "rest", "step", "eval") if name in measured.phases]
    rows = []
    for name in names:
        phase = measured.phases[name]
        expected = predicted.bytes_of(name) if name in predicted.phases else 0
        cells = (
            f"{phase.seconds_median:.3f}",
            f"± {(phase.seconds_most - phase.seconds_least) / 2:.3f}" if phase.times > 1 else "",
            "" if name == "eval" else f"{phase.seconds_median / measured.phases['step'].seconds_median:.0%}",
            "" if phase.tokens_per_second is None else f"{phase.tokens_per_second:,.0f}",
            gib(phase.peak_bytes) if phase.peak_bytes else "",
            gib(expected) if expected else "",
            f"{expected / phase.peak_bytes:.2f}" if expected and phase.peak_bytes else "",
        )
        rows.append((name, *cells))
    columns = ("phase", "seconds", "", "share", "tokens/s", "peak", "predicted", "ratio")
    title = "a step, phase by phase (median and half the range of the measured steps)"
    return Table(columns, tuple(rows), frozenset(columns[1:]), names.index("step"), title)
