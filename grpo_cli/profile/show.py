"""The findings of a profile in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from grpo_cli.profile.estimate import EXACT, KINDS, MOST, total
from grpo_cli.profile.findings import Findings, tokens_per_second
from grpo_cli.profile.measure import PHASES, Measured
from grpo_cli.profile.shapes import Sizes
from grpo_cli.report.show import print_table
from grpo_cli.report.tables import Table
from grpo_cli.support.formatting import gib


def show(findings: Findings, console: Console) -> None:
    """Print tables of time and memory, then what fits."""
    measured = findings.measured
    if measured is not None:
        print_table(console, _phases(findings, measured))
        console.print(_engine_line(measured), highlight=False)
    print_table(console, _memory(findings))
    notes = [f"Not predicted: {note}." for note in findings.not_predicted]
    for line in (*notes, *_fit_lines(findings)):
        console.print(line, highlight=False, markup=False)


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], marked: int | None = None) -> Table:
    """All columns but the first are numbers."""
    return Table(columns, tuple(rows), frozenset(columns[1:]), marked, title)


def _phases(findings: Findings, measured: Measured) -> Table:
    names = [name for name in (*PHASES[:-1], "rest", "step", "eval") if name in measured.phases]
    rows = []
    for name in names:
        phase, predicted = measured.phases[name], findings.predicted.phases.get(name)
        speed = tokens_per_second(phase)
        cells = (
            f"{phase.median:.3f}",
            f"± {(max(phase.seconds) - min(phase.seconds)) / 2:.3f}" if len(phase.seconds) > 1 else "",
            "" if name == "eval" else f"{phase.median / measured.phases['step'].median:.0%}",
            "" if speed is None else f"{speed:,.0f}",
            gib(phase.peak_bytes) if phase.peak_bytes else "",
            "" if predicted is None else gib(total(predicted)),
        )
        rows.append((name, *cells))
    columns = ("phase", "seconds", "", "share", "tokens/s", "peak", "predicted")
    title = "a step, phase by phase (median and half the range of the measured steps)"
    return _table(title, columns, rows, names.index("step"))


def _engine_line(measured: Measured) -> str:
    engine = measured.engine
    steps, slots, busy = (engine[f"engine/{name}"] for name in ("decode_steps", "slots", "slot_utilisation"))
    kept = gib(int(engine["engine/kv_peak_bytes"]))
    return f"rollouts: {steps:.0f} decode steps in {slots:.0f} slots, {busy:.0%} of them busy; KV cache {kept}"


def _memory(findings: Findings) -> Table:
    """What holds memory at the peak, measured and predicted, and the exact kinds each at its own peak."""
    measured, predicted, at_most = findings.measured, findings.predicted, findings.at_most
    phase = predicted.fullest if measured is None else measured.fullest
    there, most = predicted.phases.get(phase, {}), at_most.phases[at_most.fullest]

    def row(name: str, size: int | None, expected: int, most: str) -> tuple[str, ...]:
        if size is None:
            return name, gib(expected), most
        return name, gib(size), gib(expected), f"{expected / size:.2f}" if size else "", most

    held: Sizes = {} if measured is None else measured.memory
    exact: Sizes = {} if measured is None else measured.exact
    # Each column at its own peak, but for the prediction, which is compared with the measured one.
    rows = [row(kind, held.get(kind), there.get(kind, 0), gib(most.get(kind, 0))) for kind in KINDS]
    peak = None if measured is None else measured.peak_bytes
    rows.append(row(f"all, in {phase}", peak, total(there), f"{gib(at_most.peak)} in {at_most.fullest}"))
    for kind in EXACT:
        if exact.get(kind) != held.get(kind):
            rows.append(row(f"{kind}, elsewhere", exact[kind], predicted.exact[kind], gib(at_most.exact[kind])))
    columns = ("held by", *(["predicted"] if measured is None else ["measured", "predicted", "ratio"]), "at most")
    return _table("memory, at its fullest", columns, rows, len(KINDS))


def _fit_lines(findings: Findings) -> list[str]:
    at_most, room = findings.at_most, findings.room
    verdict = "fits in" if at_most.peak <= room else "does not fit in"
    unlimited = {"n": f"{MOST} or more", "sampler.slots": "as many as rollouts"}
    found = [
        f"{key} {unlimited.get(key, 'any') if value == 0 else 'none' if value is None else value}"
        for key, value in findings.largest.items()
    ]
    return [
        f"With every rollout at full length it takes {gib(at_most.peak)}: that {verdict} {gib(room)}.",
        f"The largest that fits, each alone: {', '.join(found)}.",
    ]
