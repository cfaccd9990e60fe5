"""The findings of a profile as a person reads them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from grpo_cli.profile.estimate import EXACT, KINDS, MOST, total
from grpo_cli.profile.findings import Findings, times_floor, tokens_per_second
from grpo_cli.profile.measure import PHASES, Measured, Phase
from grpo_cli.support.formatting import gib


def show(findings: Findings, console: Console) -> None:
    """Tables of time and memory, then what dominates."""
    if findings.measured is not None:
        console.print(_phases(findings, findings.measured))
        console.print(_engine_line(findings.measured), highlight=False)
    console.print(_memory(findings))
    console.print(_floors(findings))
    for line in findings.not_predicted:
        console.print(f"Not predicted: {line}.", highlight=False, markup=False)
    for line in _fit_lines(findings):
        console.print(line, highlight=False, markup=False)
    for line in findings.advice:
        console.print(line, highlight=False, markup=False)


def _phases(findings: Findings, measured: Measured) -> Table:
    table = Table(
        title="a step, phase by phase (median and half the range of the measured steps)", title_justify="left"
    )
    for column in ("phase", "seconds", "", "share", "tokens/s", "peak", "predicted"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    step = measured.phases["step"]
    order = [name for name in (*PHASES[:-1], "rest", "step", "eval") if name in measured.phases]
    for name in order:
        phase = measured.phases[name]
        predicted = findings.predicted.phases.get(name)
        table.add_row(
            name,
            f"{phase.median:.3f}",
            f"± {(max(phase.seconds) - min(phase.seconds)) / 2:.3f}" if len(phase.seconds) > 1 else "",
            "" if name == "eval" else f"{phase.median / step.median:.0%}",
            _speed(phase),
            gib(phase.peak_bytes) if phase.peak_bytes else "",
            "" if predicted is None else gib(total(predicted)),
            end_section=name in ("rest", "step"),
        )
    return table


def _speed(phase: Phase) -> str:
    speed = tokens_per_second(phase)
    return "" if speed is None else f"{speed:,.0f}"


def _engine_line(measured: Measured) -> str:
    engine = measured.engine
    steps, slots, busy = (engine[f"engine/{name}"] for name in ("decode_steps", "slots", "slot_utilisation"))
    kept = gib(int(engine["engine/kv_peak_bytes"]))
    return f"rollouts: {steps:.0f} decode steps in {slots:.0f} slots, {busy:.0%} of them busy; KV cache {kept}"


def _memory(findings: Findings) -> Table:
    """What memory is held by at the peak, measured and predicted, and what shapes decide, each at its most."""
    measured, predicted, at_most = findings.measured, findings.predicted, findings.at_most
    table = Table(title="memory, at its fullest", title_justify="left")
    columns = ["", *(["measured", "predicted", "ratio"] if measured else ["predicted"]), "at most"]
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    phase = measured.fullest if measured is not None else predicted.fullest
    there = predicted.phases.get(phase, {})
    for kind in KINDS:
        # Each column at its own peak, but for the prediction, which is compared with the measured one.
        most = at_most.phases[at_most.fullest].get(kind, 0)
        if measured is None:
            table.add_row(kind, gib(there.get(kind, 0)), gib(most))
            continue
        size = measured.memory[kind]
        table.add_row(kind, gib(size), gib(there.get(kind, 0)), _ratio(there.get(kind, 0), size), gib(most))
    peaks = [f"all, in {phase}", *([gib(measured.peak_bytes)] if measured else []), gib(total(there))]
    if measured is not None:
        peaks.append(_ratio(total(there), measured.peak_bytes))
    table.add_section()
    table.add_row(*peaks, f"{gib(at_most.peak)} in {at_most.fullest}")
    if measured is not None:
        table.add_section()
        for kind in EXACT:
            size, expected = measured.exact[kind], predicted.exact[kind]
            if size != measured.memory[kind]:
                row = (gib(size), gib(expected), _ratio(expected, size), gib(at_most.exact[kind]))
                table.add_row(f"{kind}, elsewhere", *row)
    return table


def _floors(findings: Findings) -> Table:
    """The least that each phase could take, and how far from it it is."""
    rates = findings.rates
    title = "the least that phases could take"
    if rates is not None:
        speed = f"{rates.bytes_per_second / 1e9:,.0f} GB/s, {rates.operations_per_second / 1e12:,.3g} TFLOP/s"
        title += f", at {speed} ({rates.source})"
    table = Table(title=title, title_justify="left")
    timed = ["floor", "bound by", "times the floor"] if rates is not None else []
    for column in ("phase", "GB moved", "TFLOP", *timed):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for name, floor in findings.floors.items():
        row = [name, f"{floor.nbytes / 1e9:,.3g}", f"{floor.operations / 1e12:,.3g}"]
        if rates is not None:
            far = times_floor(findings, name)
            row += [f"{floor.seconds(rates):.3g} s", floor.bound(rates), "" if far is None else f"{far:,.1f}"]
        table.add_row(*row)
    return table


def _ratio(predicted: int, measured: int) -> str:
    return "" if not measured else f"{predicted / measured:.2f}"


def _fit_lines(findings: Findings) -> list[str]:
    at_most, room = findings.at_most, findings.room
    verdict = "fits in" if at_most.peak <= room else "does not fit in"
    lines = [f"With every rollout at full length it takes {gib(at_most.peak)}: that {verdict} {gib(room)}."]
    unlimited = {"n": f"{MOST} or more", "sampler.slots": "as many as rollouts"}
    found = [
        f"{key} {unlimited.get(key, 'any') if value == 0 else 'none' if value is None else value}"
        for key, value in findings.largest.items()
    ]
    lines.append(f"The largest that fits, each alone: {', '.join(found)}.")
    return lines
