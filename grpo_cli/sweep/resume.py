"""A command's sweep, and `resume=sweep`, which continues one with the overrides that it was started with."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpo_cli.config.overrides import overrides, renamed, value_of
from grpo_cli.config.trust import not_taken, taken
from grpo_cli.runs.layout import CHECKPOINTS, MULTIRUN, SWEEP
from grpo_cli.runs.record import has_record
from grpo_cli.runs.summary import read_object
from grpo_cli.support.errors import UserError
from grpo_cli.sweep.status import Job, Status

RESUME = "resume=sweep"


@dataclass
class Sweep:
    """A command's sweep: what the launcher must know of it, and what became of its jobs, by their numbers.

    `check` raises UserError for a job's config that cannot be run. `flags` and `of_hydra` are Hydra's, for every job.
    It is pickled to where the jobs run.
    """

    command: str
    check: Callable[[DictConfig], Any]
    flags: Sequence[str] = ()
    resume: bool = False
    of_hydra: Sequence[str] = ()
    folder: Path | None = None
    jobs: dict[int, Job] = field(default_factory=dict)
    outcomes: dict[int, Status] = field(default_factory=dict)

    @property
    def objective(self) -> str:
        """The value in a job's `summary.json` that a sweeper optimises."""
        return {"train": "final_accuracy", "eval": "eval/accuracy", "profile": "peak_bytes"}[self.command]

    def command_of(self, job: Job) -> list[str]:
        """What one would type to run the job by hand, or to continue it."""
        of_hydra = [*self.of_hydra, f"hydra.job.num={job.number}", f"hydra.job.id={job.number}"]
        if self.command == "train" and (has_record(job.folder) or (job.folder / CHECKPOINTS).exists()):
            # Its settings are those of its own record, and what is not taken from a record was typed for the sweep.
            arguments = [word.lstrip("+") for word in overrides({"resume": str(job.folder)})]
            arguments += not_taken(job.overrides, job.folder)
        else:
            arguments = [*job.overrides, *overrides({"hydra.run.dir": str(job.folder)})]
        return [sys.executable, "-P", "-m", "grpo_cli", self.command, *self.flags, *of_hydra, *arguments]

    def counts(self) -> Counter[str]:
        return Counter(status.state for status in self.outcomes.values())

    def done(self) -> list[Job]:
        return [job for number, job in self.jobs.items() if self.outcomes[number].state == "done"]

    def summary(self) -> str:
        """How it ended, and how to go on with it."""
        counts = self.counts()
        states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        lines = [f"{len(self.outcomes)} jobs: {states}"]
        if counts["failed"] or counts["waiting"] or counts["running"]:
            folder = shlex.quote(str(self.folder))
            lines.append(f"go on with: grpo {self.command} -m {RESUME} hydra.sweep.dir={folder}")
        return "\n".join(lines)


def sweep_of(
    command: str, flags: Sequence[str], given: Sequence[str], check: Callable[[DictConfig], Any]
) -> tuple[list[str], Sweep]:
    """The arguments to compose, and what the launcher has to know if this is a sweep.

    With `resume=sweep` the arguments are those that the sweep began with. UserError if they cannot be.
    """
    multirun = {"-m", "--multirun"} & set(flags)
    others = [flag for flag in flags if flag not in multirun]
    if RESUME not in given:
        return [*flags, *for_the_sweeper(command, given)], Sweep(command, check, others)
    if not multirun:
        raise UserError(f"{RESUME} goes on with a sweep: add -m, or name the folder of one run")
    own = [word for word in given if word != RESUME]
    began = started_with(command, own, others)
    sweep = Sweep(command, check, others, resume=True)
    return [*flags, *began], sweep


def started_with(command: str, own: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    """The overrides of the sweep in `hydra.sweep.dir`, or of the newest one, then `own`, those of this command line.
    What is not taken from a stranger's folder has to be among `own` (`config.trust`)."""
    named = value_of("hydra.sweep.dir", own)
    folder = Path(named) if named else _last_sweep(MULTIRUN)
    if folder is not None and not folder.exists():
        folder = folder.expanduser()  # the shell leaves `~` alone after a key with dots
    asked = {} if folder is None else read_object(folder / SWEEP)
    new = [word for word in own if not is_of(word, ("sweep.dir",)) and word not in _listed(asked)]
    changed = [word for word in new if not is_of(word, ("launcher",))]
    if changed:
        raise UserError(
            f"resume=sweep goes on with the jobs as they were: leave out {' '.join(changed)}, or start a new sweep"
        )
    if folder is None:
        raise UserError(f"resume=sweep found no sweep below {MULTIRUN}; name one with hydra.sweep.dir=<folder>")
    if not asked:
        raise UserError(
            f"hydra.sweep.dir={folder} holds no sweep: it has no {SWEEP}. If the sweep was killed before it had begun, "
            "start it there again, as before"
        )
    try:
        if asked["command"] != command:
            raise UserError(f"{folder} is a sweep of grpo {asked['command']}: go on with it by that command")
        of_hydra, jobs = asked["hydra"], [renamed(word) for word in asked["overrides"]]
        if any(word.startswith("hydra/launcher=") for word in new):  # with settings of its own
            of_hydra = [word for word in of_hydra if not is_of(word, ("launcher",))]
        lacking = [word for word in asked["flags"] if word not in flags]
        recorded = taken([*of_hydra, *jobs], own, folder)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / SWEEP} lists no sweep ({error}); start a new sweep") from error
    if lacking:
        raise UserError(
            f"{folder} was started with {' '.join(map(str, lacking))}, which is not taken from its {SWEEP}: type it on "
            "this command line as well"
        )
    return [*recorded, *new, *overrides({"hydra.sweep.dir": str(folder)})]


def _listed(asked: Mapping[str, Any]) -> list[Any]:
    """The overrides that a sweep's file lists."""
    return [word for key in ("hydra", "overrides") if isinstance(asked.get(key), list) for word in asked[key]]


# Optuna's sweeper would minimise, stop at the first failure and draw two jobs at a time, however many run.
_FOR_OPTUNA = {"max_failure_rate": "1.0", "n_jobs": "${oc.select:hydra.launcher.jobs,1}"}


def for_the_sweeper(command: str, given: Sequence[str]) -> list[str]:
    """The overrides, and before them what `hydra/sweeper=optuna` needs to look for the best run: the one with the
    highest accuracy, or of profiles the one with the lowest peak of memory."""
    if "hydra/sweeper=optuna" not in given:
        return list(given)
    ours = {"direction": "minimize" if command == "profile" else "maximize", **_FOR_OPTUNA}
    return [*(f"hydra.sweeper.{key}={value}" for key, value in ours.items()), *given]


def _last_sweep(below: Path) -> Path | None:
    last = max(below.glob(f"*/{SWEEP}"), key=lambda path: path.stat().st_mtime, default=None)
    return None if last is None else last.parent


def is_of(word: str, parts: Sequence[str]) -> bool:
    """Whether an override is one of Hydra's settings below one of these."""
    key = word.lstrip("+~").partition("=")[0].replace("/", ".").partition("@")[0]
    return any(key == f"hydra.{part}" or key.startswith(f"hydra.{part}.") for part in parts)
