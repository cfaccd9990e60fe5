"""The names of the files and folders that commands write; no other module spells them.

    outputs/<command>/<date>_<time>-<id>/      a run's folder; a sweep's job has outputs/multirun/<...>/<number>/
        run.json                               its composed config, with what later starts have changed
        .lock                                  held by the process that writes here
        metrics.jsonl rollouts.jsonl           its records, as it runs
        checkpoints/step_000100/               a checkpoint; `COMPLETE` is written last
        summary.json                           how it ended
        status.json log.txt                    of a sweep's job: its state and its output

Where a run's folder is made is set in conf/ (`hydra.run.dir`, `hydra.sweep.dir`).
"""

from __future__ import annotations

import re
import secrets
from datetime import datetime
from pathlib import Path

OUTPUTS = Path("outputs")
MULTIRUN = OUTPUTS / "multirun"

RUN, LOCK = "run.json", ".lock"
METRICS, ROLLOUTS, SUMMARY = "metrics.jsonl", "rollouts.jsonl", "summary.json"
SAMPLES = "samples.jsonl"  # of an evaluation: every answer
JUDGEMENTS = "judgements.jsonl"  # of task.reward=judge: the judge's scores, by a hash of the question
PROFILE = "profile.json"  # of a profile: everything measured and predicted
STATUS, LOG, SWEEP = "status.json", "log.txt", "sweep.json"
HYDRAS_SWEEP = "multirun.yaml"  # written by Hydra into a sweep's folder, whatever the launcher
WANDB, WANDB_ID, TENSORBOARD = "wandb", "wandb_id.txt", "events"
BAD_BATCHES = "bad_batches"

CHECKPOINTS, TRAINER_STATE, COMPLETE = "checkpoints", "trainer_state.pt", "COMPLETE"
UNFINISHED = ".tmp"  # suffix of the hidden name of what is being written or removed
_STEP = re.compile(r"step_(\d+)|\.step_(\d+)\.tmp")


def step_folder(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name, finished or not; None for any other name.

    >>> step_of("step_000100"), step_of(".step_000100.tmp"), step_of("best")
    (100, 100, None)
    """
    found = _STEP.fullmatch(name)
    return int(found[1] or found[2]) if found else None


def run_of(folder: Path) -> Path:
    """Return the folder of the run that a checkpoint's folder belongs to; any other folder is the run's."""
    return folder if step_of(folder.name) is None or (folder / RUN).exists() else folder.parent.parent


def new_folder(command: str) -> Path:
    """Return a new folder for the output of `command`, named as Hydra names those of runs; not created."""
    return OUTPUTS / command / f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"
