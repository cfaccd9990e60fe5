"""A command's sweep, and `resume=sweep`, which continues one with its original overrides."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpo_cli.config.overrides import key_of, quoted, value_of
from grpo_cli.config.trust import taken
from grpo_cli.runs.files import read_object
from grpo_cli.runs.layout import CHECKPOINTS, MULTIRUN, RUN, SWEEP
from grpo_cli.support.errors import UserError
from grpo_cli.sweep.pool import Job, JobState

RESUME = "resume=sweep"
# By default Optuna's sweeper minimises, stops at the first failure and draws two jobs at a time.
_FOR_OPTUNA = {"max_failure_rate": "1.0", "n_jobs": "${oc.select:hydra.launcher.jobs,1}"}


@dataclass
class Sweep:
    """A command's sweep: what the launcher must know, and the states of its jobs.

    `read` returns the settings of a job's config: UserError for a wrong value, which ends the sweep. `check` returns
    what they compute: UserError if they cannot be combined, which skips the job. `of_hydra` are Hydra's words.
    """

    command: str
    read: Callable[[DictConfig], Any]
    check: Callable[[Any], str]
    resume: bool = False
    of_hydra: Sequence[str] = ()
    folder: Path | None = None
    states: dict[Job, JobState] = field(default_factory=dict)

    def command_of(self, job: Job) -> list[str]:
        """Return the command that runs the job, or continues it."""
        of_hydra = [*self.of_hydra, f"hydra.job.num={job.number}", f"hydra.job.id={job.number}"]
        begun = (job.folder / RUN).exists() or (job.folder / CHECKPOINTS).exists()
        place = "resume" if self.command == "train" and begun else "hydra.run.dir"
        words = [*of_hydra, *job.overrides, f"{place}={quoted(str(job.folder))}"]
        return [sys.executable, "-P", "-m", "grpo_cli", self.command, *words]

    def counts(self) -> Counter[str]:
        """Return how many jobs are in each state."""
        return Counter(status.state for status in self.states.values())

    def summary(self) -> str:
        """Return how it ended, and how to continue it."""
        counts = self.counts()
        text = f"{len(self.states)} jobs: {', '.join(f'{count} {state}' for state, count in sorted(counts.items()))}"
        if counts["failed"] or counts["waiting"]:
            own = [f"--config-dir={word.partition('file://')[2][:-2]}" for word in self.of_hydra if "file://" in word]
            words = ["-m", *own, RESUME, f"hydra.sweep.dir={self.folder}"]
            text += f"\ngo on with: grpo {self.command} {shlex.join(words)}"
        if self.command == "train" and counts["done"]:
            text += f"\ncompare them: grpo report {shlex.quote(str(self.folder))}"
        return text


def sweep_of(
    command: str, given: Sequence[str], read: Callable[[DictConfig], Any], check: Callable[[Any], str]
) -> tuple[list[str], Sweep]:
    """Return the overrides of a sweep, and what the launcher has to know of it.

    With `resume=sweep` they are those that the sweep began with, UserError if they cannot be found.
    """
    if RESUME in given:
        return started_with(command, [word for word in given if word != RESUME]), Sweep(command, read, check, True)
    needed = dict[str, str]()
    if "hydra/sweeper=optuna" in given:  # to find the highest accuracy or, for profiles, the lowest peak memory
        needed = {"direction": "minimize" if command == "profile" else "maximize", **_FOR_OPTUNA}
    return [*(f"hydra.sweeper.{key}={value}" for key, value in needed.items()), *given], Sweep(command, read, check)


def started_with(command: str, own: Sequence[str]) -> list[str]:
    """Return the overrides of the sweep in `hydra.sweep.dir`, or of the newest one, then `own`, those of this command
    line. Those that an untrusted folder may not set have to be among `own` (`config.trust`)."""
    named = value_of("hydra.sweep.dir", own)
    newest = max(MULTIRUN.glob(f"*/{SWEEP}"), key=lambda path: path.stat().st_mtime, default=MULTIRUN / SWEEP).parent
    folder = Path(named) if named else newest
    listed = read_object(folder / SWEEP)
    if not listed:
        raise UserError(f"{folder} holds no sweep ({SWEEP}); name one with hydra.sweep.dir=<folder>, or start it there")
    try:
        if listed["command"] != command:
            raise UserError(f"{folder} is a sweep of grpo {listed['command']}: continue it with that command")
        recorded = taken([*listed["hydra"], *listed["overrides"]], own, folder)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / SWEEP} lists no sweep ({error}); start a new sweep") from error
    new = [word for word in own if not is_of(word, ("sweep.dir",)) and word not in recorded]
    if changed := [word for word in new if not is_of(word, ("launcher",))]:
        raise UserError(f"resume=sweep changes no jobs: leave out {' '.join(changed)}, or start a new sweep")
    return [*recorded, *new, f"hydra.sweep.dir={quoted(str(folder))}"]


def is_of(word: str, parts: Sequence[str]) -> bool:
    """True if an override is of a Hydra setting in or below one of `parts`."""
    key = key_of(word).replace("/", ".").partition("@")[0]
    return any(key == f"hydra.{part}" or key.startswith(f"hydra.{part}.") for part in parts)
