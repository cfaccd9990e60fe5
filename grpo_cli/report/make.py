"""`grpo report`: reads, compares and plots runs, and writes and shows the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from grpo_cli.report import plots
from grpo_cli.report.compare import Comparison, compare, differences
from grpo_cli.report.curves import GREEDY
from grpo_cli.report.overview import in_files, overview
from grpo_cli.report.read import Run, State, read_all
from grpo_cli.report.recorded_settings import words
from grpo_cli.report.rollouts import before_and_after
from grpo_cli.report.tables import as_json, show, show_evaluations
from grpo_cli.runs import layout
from grpo_cli.runs.files import json_line, write_atomically
from grpo_cli.support import terminal
from grpo_cli.support.errors import UserError
from grpo_cli.support.extras import absent, installed
from grpo_cli.support.formatting import plain, shown


def make(
    folders: Sequence[Path],
    out: Path | None = None,
    target: float | None = None,
    metric: str = GREEDY,
    base: str | None = None,
    console: Console | None = None,
) -> Comparison | None:
    """Report on every run in or below `folders`, into `out` or a new folder below outputs/report.

    The folder gets pictures, tables, rollouts early and late, and `report.json` with every number; of evaluations
    alone a table is shown and nothing written (None). UserError if there are no runs or `out` cannot be written.
    """
    console = console or terminal.console()
    read = read_all(folders, metric)
    if read and all(run.recorded.command == "eval" for run in read):
        columns = [*differences([run.recorded for run in read])[0]]
        columns += ["seed"] * (len({run.recorded.seed for run in read}) > 1)
        done = [run for run in read if run.state == State.COMPLETED]
        show_evaluations([(words(run.recorded.settings, columns) or run.name, run.folder) for run in done])
        for run in (run for run in read if run.state != State.COMPLETED):
            why = "; ".join(filter(None, (run.state.value, run.reason, *run.notes)))
            console.print(f"{run.name}: {why}", markup=False, highlight=False, soft_wrap=True)
        if out is not None:
            terminal.to_stderr(f"nothing is written to {out}: a report of evaluations alone is this table")
        return None
    comparison = compare(training_runs(read, folders, metric), target, metric, base)
    notes = [] if installed("matplotlib") else [absent("matplotlib", "a picture")]
    if others := [run.name for run in read if run.recorded.command != "train"]:
        notes.append(f"Left out, not being training runs: {', '.join(others)}.")
    drawn = plots.pictures(comparison) if installed("matplotlib") else {}
    files = {**drawn, "report.json": json_line(as_json(comparison), indent=1).encode()}
    files |= in_files(comparison) if comparison.arms else {}
    first = [(arm.label, arm.runs[0]) for arm in comparison.arms if arm.runs]
    named = {f"{label}: run {run.name}, seed {shown(run.recorded.seed)}": run.folder for label, run in first}
    files |= {"rollouts.md": text.encode()} if (text := before_and_after(named)) else {}
    out = (out or layout.new_folder("report")).expanduser()
    for name, data in files.items():
        write_atomically(out / name, data)
    for line in overview(comparison):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    show(comparison, console)
    for note in notes:
        console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{', '.join(files)}: {out}", markup=False, highlight=False, soft_wrap=True)
    return comparison


def training_runs(read: Sequence[Run], folders: Sequence[Path], metric: str) -> list[Run]:
    """Return the training runs of `read`, from `folders`. UserError if there is none, or if they have measured other
    accuracies than `metric`."""
    runs = [run for run in read if run.recorded.command == "train"]
    if not runs:
        named = ", ".join(plain(folder) for folder in folders)
        raise UserError(
            f"no training run in or below {named}; `grpo train` leaves them in {layout.OUTPUTS}/train, "
            f"`grpo train -m` in {layout.MULTIRUN}"
        )
    measured = sorted({name for run in runs for name in run.accuracies})
    if metric not in measured and (measured or metric != GREEDY):
        there = f"they have {', '.join(measured)}" if measured else "they were not evaluated (eval.every=0)"
        raise UserError(f"--metric={plain(metric)} is no accuracy in these runs: {there}")
    return runs
