"""What a profile found: as `profile.json`, as named numbers for a tracker, and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_cli.memory.measure import PHASES, Measured, Phase
from grpo_cli.memory.plan import EXACT, KINDS, MemoryPlan
from grpo_cli.memory.shapes import Sizes
from grpo_cli.report.profiles import SCHEMA
from grpo_cli.report.show import print_table
from grpo_cli.report.tables import Table
from grpo_cli.runs.files import json_line, write_atomically
from grpo_cli.runs.layout import PROFILE as FILE
from grpo_cli.support.formatting import gib

MOST = 1024  # rollouts per prompt: the search for the largest group that fits stops here


@dataclass(frozen=True)
class Findings:
    """`measured` is None for a plan. `predicted` is for the lengths that were seen or forced, `at_most` for rollouts
    that are all of full length; `largest` are the largest values that then fit `room` bytes (None: none does, 0: any
    does). `not_predicted` is what both leave out."""

    about: Mapping[str, Any]  # command, device, threads, versions, settings
    measured: Measured | None
    predicted: MemoryPlan
    at_most: MemoryPlan
    room: int
    largest: Mapping[str, int | None]
    not_predicted: tuple[str, ...] = ()

    @property
    def document(self) -> dict[str, Any]:
        """The findings as plain values, in seconds and bytes; every file has every key."""
        return {
            "schema": SCHEMA,
            **self.about,
            "measured": None if self.measured is None else _measured(self.measured),
            "predicted": _predicted(self.predicted),
            "predicted_at_most": _predicted(self.at_most),
            "not_predicted": list(self.not_predicted),
            "fit": {
                "room_bytes": self.room,
                "fits": self.at_most.peak <= self.room,
                "largest": dict(self.largest),
            },
        }

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers (see `metrics.py`)."""
        numbers: dict[str, float] = {"profile/predicted_peak_bytes": self.predicted.peak}
        numbers |= {f"profile/predicted_{kind}_bytes": self.predicted.exact[kind] for kind in EXACT}
        if self.measured is not None:
            numbers["profile/peak_bytes"] = self.measured.peak_bytes
            numbers |= {f"profile/{kind}_bytes": self.measured.exact[kind] for kind in EXACT}
            for name, phase in self.measured.phases.items():
                numbers |= {f"profile/{name}_seconds": phase.median, f"profile/{name}_peak_bytes": phase.peak_bytes}
        return {name: float(value) for name, value in numbers.items()}

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FILE, (json_line(self.document, indent=2) + "\n").encode())

    def show(self, console: Console) -> None:
        """Print tables of time and memory, then what fits."""
        if self.measured is not None:
            print_table(console, _phases(self.measured, self.predicted))
            engine = self.measured.engine
            steps, slots, busy = (engine[f"engine/{name}"] for name in ("decode_steps", "slots", "slot_utilisation"))
            kept = gib(int(engine["engine/kv_peak_bytes"]))
            line = f"rollouts: {steps:.0f} decode steps in {slots:.0f} slots, {busy:.0%} of them busy; KV cache {kept}"
            console.print(line, highlight=False)
        print_table(console, _memory(self))
        verdict = "fits in" if self.at_most.peak <= self.room else "does not fit in"
        unlimited = {"n": f"{MOST} or more", "sampler.slots": "as many as rollouts"}
        largest = ", ".join(
            f"{key} {unlimited.get(key, 'any') if value == 0 else 'none' if value is None else value}"
            for key, value in self.largest.items()
        )
        for line in (
            *(f"Not planned: {note}." for note in self.not_predicted),
            f"With every rollout at full length it takes {gib(self.at_most.peak)}: that {verdict} {gib(self.room)}.",
            f"The largest that fits, each alone: {largest}.",
        ):
            console.print(line, highlight=False, markup=False)


def _measured(measured: Measured) -> dict[str, Any]:
    return {
        "phases": {name: _phase(phase) for name, phase in measured.phases.items()},
        "engine": dict(measured.engine),
        "peak": {"phase": measured.fullest, "bytes": measured.peak_bytes, "held_by": _sizes(measured.memory)},
        "exact_bytes": dict(measured.exact),
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "seconds_median": phase.median,
        "seconds_least": min(phase.seconds),
        "seconds_most": max(phase.seconds),
        "times": len(phase.seconds),
        "tokens": phase.tokens,
        "tokens_per_second": phase.tokens_per_second,
        "peak_bytes": phase.peak_bytes,
    }


def _predicted(plan: MemoryPlan) -> dict[str, Any]:
    phases = {name: {"bytes": plan.bytes_of(name), "held_by": _sizes(sizes)} for name, sizes in plan.phases.items()}
    return {"phases": phases, "peak": {"phase": plan.fullest, "bytes": plan.peak}, "exact_bytes": dict(plan.exact)}


def _sizes(sizes: Sizes) -> dict[str, int]:
    return {kind: sizes.get(kind, 0) for kind in KINDS}


def _phases(measured: Measured, predicted: MemoryPlan) -> Table:
    names = [name for name in (*PHASES[:-1], "rest", "step", "eval") if name in measured.phases]
    rows = []
    for name in names:
        phase, speed = measured.phases[name], measured.phases[name].tokens_per_second
        cells = (
            f"{phase.median:.3f}",
            f"± {(max(phase.seconds) - min(phase.seconds)) / 2:.3f}" if len(phase.seconds) > 1 else "",
            "" if name == "eval" else f"{phase.median / measured.phases['step'].median:.0%}",
            "" if speed is None else f"{speed:,.0f}",
            gib(phase.peak_bytes) if phase.peak_bytes else "",
            gib(predicted.bytes_of(name)) if name in predicted.phases else "",
        )
        rows.append((name, *cells))
    columns = ("phase", "seconds", "", "share", "tokens/s", "peak", "predicted")
    title = "a step, phase by phase (median and half the range of the measured steps)"
    return _table(title, columns, rows, names.index("step"))


def _memory(found: Findings) -> Table:
    """What holds memory at the peak, measured and predicted."""
    measured, most = found.measured, found.at_most.phases[found.at_most.fullest]
    phase = found.predicted.fullest if measured is None else measured.fullest
    there: Sizes = found.predicted.phases.get(phase, {})

    def row(name: str, size: int | None, expected: int, most: str) -> tuple[str, ...]:
        if size is None:
            return name, gib(expected), most
        return name, gib(size), gib(expected), f"{expected / size:.2f}" if size else "", most

    held: Sizes = {} if measured is None else measured.memory
    rows = [row(kind, held.get(kind), there.get(kind, 0), gib(most.get(kind, 0))) for kind in KINDS]
    peak = None if measured is None else measured.peak_bytes
    rows.append(
        row(f"all, in {phase}", peak, sum(there.values()), f"{gib(found.at_most.peak)} in {found.at_most.fullest}")
    )
    columns = ("held by", *(["predicted"] if measured is None else ["measured", "predicted", "ratio"]), "at most")
    return _table("memory, at its fullest", columns, rows, len(KINDS))


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], marked: int) -> Table:
    """All columns but the first are numbers."""
    return Table(columns, tuple(rows), frozenset(columns[1:]), marked, title)
