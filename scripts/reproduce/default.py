"""The default run: what `grpo train` comes to with nothing set, one run a seed.

    scripts/reproduce.sh default
    scripts/reproduce.sh default --seeds 3 4 5

Accuracy is greedy, on the held-out problems of the run itself, before training and at its last evaluation. Seconds are
those of the run's own training clock, which depend on what else the machine does; memory is the process's peak.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import study
from common import settings_of
from study import Column, Run, mean, over_seeds

from grpo_cli.report.curves import GREEDY, curve_of

NAME = "default"
COLUMNS: dict[str, Column] = {
    "greedy accuracy before": over_seeds("start_greedy"),
    "at the end": over_seeds("final_greedy"),
    "seconds of training": mean("train_seconds", ".0f"),
    "peak memory, bytes": mean("peak_memory_bytes", ".3g"),
}


def runs_of(args: argparse.Namespace) -> list[Run]:
    length = (f"train.steps={args.steps}",) if args.steps else ()
    return [Run(NAME, NAME, seed, ("logger=jsonl", f"seed={seed}", *length)) for seed in args.seeds]


def of_run(run: Run, out: Path) -> dict[str, Any]:
    """Its accuracies, and what its summary says it took."""
    curve = curve_of(study.read_rows(run, out), GREEDY)
    summary = json.loads((out / run.name / "summary.json").read_text(encoding="utf-8"))
    took = {key: summary[key] for key in ("train_seconds", "peak_memory_bytes", "generated_tokens", "trained_tokens")}
    return {"start_greedy": curve.accuracy[0], "final_greedy": curve.accuracy[-1], "steps": curve.steps[-1], **took}


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    return study.parsed(study.study_parser(__doc__, None), words, seeds=[0], steps=2)


def main(words: Sequence[str] | None = None) -> None:
    args = options(words)
    out, runs = study.folder(args, NAME), runs_of(args)
    study.run_all("train", {run.name: run.words for run in runs}, out, args)
    found = {run.seed: of_run(run, out) for run in runs}
    table = study.markdown(COLUMNS, [[column(list(found.values())) for column in COLUMNS.values()]])
    tried = {"problems": settings_of().eval.problems, "results": found}
    study.write_results(args, out, table, tried)


if __name__ == "__main__":
    main()
