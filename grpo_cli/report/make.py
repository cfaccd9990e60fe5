"""`grpo report`: reads, compares and plots runs, and writes and shows the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from grpo_cli.report import plots
from grpo_cli.report.compare import Comparison, compare
from grpo_cli.report.curves import GREEDY
from grpo_cli.report.evaluations import named, show_evaluations
from grpo_cli.report.read import of_training, read_all
from grpo_cli.report.show import show
from grpo_cli.report.tables import as_json
from grpo_cli.runs import layout
from grpo_cli.runs.files import json_line
from grpo_cli.runs.record import has_record
from grpo_cli.support import terminal
from grpo_cli.support.errors import UserError


def make(
    folders: Sequence[Path],
    out: Path | None = None,
    target: float | None = None,
    metric: str = GREEDY,
    console: Console | None = None,
) -> Comparison | None:
    """Report on every run in or below `folders`, into `out` or a new folder below outputs/report.

    The folder gets pictures, and `report.json` with every number; of evaluations alone a table is shown and nothing
    written (None). UserError if there are no runs or `out` cannot be written.
    """
    console = console or terminal.console()
    if out is not None and (has_record(out) or any((out / name).exists() for name in (layout.METRICS, layout.SUMMARY))):
        raise UserError(f"--out={out} is the folder of a run, and a report would write into it: choose another")
    out = out or layout.new_folder("report")
    read = read_all(folders, metric)
    if read and all(run.asked.command == "eval" for run in read):
        show_evaluations(named(read), console)
        return None
    found = of_training(read, folders, metric)
    comparison = compare(found.runs, target, metric)
    notes = [] if plots.can_draw() else [plots.NO_PICTURES]
    if found.others:
        notes.append(f"Left out, not being training runs: {', '.join(run.name for run in found.others)}.")
    drawn = plots.pictures(comparison) if plots.can_draw() else {}
    files = {**drawn, "report.json": json_line(as_json(comparison), indent=1).encode()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (out / name).write_bytes(data)
    except OSError as error:
        raise UserError(f"the report cannot be written to {out} ({error.strerror}): choose another --out") from error
    show(comparison, console)
    for note in notes:
        console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{', '.join(files)}: {out}", markup=False, highlight=False, soft_wrap=True)
    return comparison
