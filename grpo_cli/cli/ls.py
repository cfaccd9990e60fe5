"""`grpo ls`: the runs in a folder and below, one per line, newest first. Reads them as `grpo report` does."""

from __future__ import annotations

import time
from pathlib import Path

from grpo_cli.report.read import A_RUN_HAS, Run, read_all
from grpo_cli.support import terminal
from grpo_cli.support.formatting import duration, plain, shown

COLUMNS = ("command", "state", "task", "model", "n", "m", "steps", "accuracy", "age", "folder")
LEAST_NEEDED = ("command", "age", "m", "n", "task", "model")  # left out, in this order, of a narrow screen
FOLDERS = "grpo train leaves runs in outputs/train, grpo eval in outputs/eval, grpo train -m in outputs/multirun"


def list_runs(folder: Path) -> None:
    """Print the trainings and evaluations in or below a folder, with columns that fit. UserError if it is none."""
    found = [] if folder == Path("outputs") and not folder.exists() else read_all([folder])
    runs = sorted((run for run in found if run.recorded.command in ("train", "eval")), key=_last_written, reverse=True)
    if not runs:
        print(f"no runs in or below {plain(folder)}: {FOLDERS}")
        return
    paths = [folder if run.folder == folder.resolve() else folder / run.name for run in runs]
    rows = [COLUMNS, *([*map(plain, (*_cells(run), path))] for run, path in zip(runs, paths, strict=True))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    places, screen = list(range(len(COLUMNS))), terminal.console()
    for name in LEAST_NEEDED if screen.is_terminal else ():
        if sum(widths[place] + 2 for place in places) - 2 > screen.width:
            places.remove(COLUMNS.index(name))
    for row in rows:
        print("  ".join(f"{row[place]:<{widths[place]}}" for place in places).rstrip())
    for run, path in zip(runs, paths, strict=True):
        for remark in filter(None, (run.reason, *run.notes)):
            print(f"{plain(path)}: {plain(remark)}")


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
        duration(time.time() - written) if written else "-",
    ]


def _last_written(run: Run) -> float:
    """Return when the run last wrote something: seconds since the epoch, 0 if unknown."""
    times = [path.stat().st_mtime for name in A_RUN_HAS if (path := run.folder / name).exists()]
    return max(times, default=0.0)
