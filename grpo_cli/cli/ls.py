"""`grpo ls`: the runs in a folder and below, one per line, newest first. Reads them as `grpo report` does."""

from __future__ import annotations

import time
from pathlib import Path

from grpo_cli.report.read import Run, State, read_all
from grpo_cli.runs import layout
from grpo_cli.support import terminal
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import duration, plain, shown

COLUMNS = ("command", "state", "task", "model", "n", "m", "steps", "accuracy", "interval", "of", "age", "folder")
# Left out, in this order, of a narrow screen.
LEAST_NEEDED = ("interval", "of", "command", "age", "m", "n", "task", "model")
FOLDERS = "grpo train leaves runs in outputs/train, grpo eval in outputs/eval, grpo train -m in outputs/multirun"
WRITTEN = (layout.METRICS, layout.SUMMARY, layout.STATUS, layout.RUN)  # their times show when a run was alive


def list_runs(folder: Path) -> None:
    """Print the trainings and evaluations in or below a folder, with as many columns as fit. UserError if it is not a
    folder."""
    if not folder.is_dir() and folder != Path("outputs"):
        raise UserError(f"{plain(folder)} is not a folder: name one that holds runs; {FOLDERS}")
    found = read_all([folder]) if folder.is_dir() else []
    runs = sorted((run for run in found if run.recorded.command in ("train", "eval")), key=_last_written, reverse=True)
    paths = [plain(folder if run.folder == folder.resolve() else folder / run.name) for run in runs]
    cells = [COLUMNS, *((*map(plain, _cells(run)), path) for run, path in zip(runs, paths, strict=True))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    places, console = list(range(len(COLUMNS))), terminal.console()
    for name in LEAST_NEEDED if console.is_terminal else ():
        if sum(widths[place] + 2 for place in places) - 2 > console.width:
            places.remove(COLUMNS.index(name))
    lines = ["  ".join(f"{row[place]:<{widths[place]}}" for place in places).rstrip() for row in cells]
    lines = lines if runs else [f"no runs in or below {plain(folder)}: {FOLDERS}"]
    for run, path in zip(runs, paths, strict=True):
        remarks = (run.reason * (run.state is not State.COMPLETED), *run.notes)
        lines += [f"{path}: {plain(remark)}" for remark in remarks if remark]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _cells(run: Run) -> list[str]:
    known = {key: shown(value) for key, value in run.recorded.settings.items()}
    model, written, is_eval = known.get("model", "-"), _last_written(run), run.recorded.command == "eval"
    return [
        run.recorded.command,
        run.state.value,
        known.get("task", "-"),
        known.get("model.path", model) if model == "hf" else model,
        known.get("n", "-"),
        known.get("m", "-"),
        "-" if is_eval else f"{run.steps}/{known.get('train.steps', '?')}",
        "-" if run.final_accuracy is None else f"{run.final_accuracy:.3f}",
        "-" if run.accuracy_interval is None else "{:.3f}..{:.3f}".format(*run.accuracy_interval),
        "-" if run.problems is None else str(run.problems),
        duration(time.time() - written) if written else "-",
    ]


def _last_written(run: Run) -> float:
    """Return when the run last wrote something: seconds since the epoch, 0 if unknown."""
    times = [path.stat().st_mtime for name in WRITTEN if (path := run.folder / name).exists()]
    return max(times, default=0.0)
