"""The Hydra launcher of sweeps: each job becomes a process on this machine; jobs that cannot run are skipped and named.

Hydra makes it from its configuration (`conf/hydra/launcher/processes.yaml`) and finds it in `hydra_plugins`. What else
it needs to know about the command is the attribute `sweep` of the task function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from grpo_cli.runs.files import read_object, write_object
from grpo_cli.runs.layout import SUMMARY, SWEEP
from grpo_cli.runs.lock import holder, is_held, sole_use
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import is_a, shown
from grpo_cli.sweep.gpus import chosen_gpus, places, visible_gpus
from grpo_cli.sweep.pool import Job, JobState, Pool, read_status
from grpo_cli.sweep.resume import Sweep, is_of

# Of Hydra's own settings, those that concern the sweep and not its jobs.
_OF_THE_SWEEP = ("launcher", "sweeper", "sweep", "run", "mode")
# The value in a job's `summary.json` that a sweeper optimises.
_OBJECTIVES = {"train": "final_accuracy", "eval": "eval/accuracy", "profile": "peak_bytes"}
say = partial(print, flush=True)  # a line at once, also into a pipe


class ProcessLauncher:
    """A launcher: it lists and checks jobs, runs those not done and records how they ended."""

    def __init__(self, jobs: Any, gpus: Any) -> None:
        """Run `jobs` at a time on these `gpus`."""
        self._at_a_time, self._gpus = jobs, gpus

    def setup(self, *, hydra_context: HydraContext, task_function: Callable[[Any], Any], config: DictConfig) -> None:
        """Read Hydra's configuration. UserError for a sweep that cannot be run."""
        self._sweep: Sweep = task_function.sweep  # type: ignore[attr-defined]
        self._loader: ConfigLoader = hydra_context.config_loader
        self._config = config
        self._computed = dict[str, int]()  # the first job with each set of settings
        # Unresolved: `m=${n}` means each job's n.
        typed: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
        self._typed, self._typed_of_hydra = typed["task"], typed["hydra"]
        sweeper = config.hydra.runtime.choices["hydra/sweeper"]
        if sweeper == "optuna" and "hydra/sweeper=optuna" not in self._typed_of_hydra:
            raise UserError("type hydra/sweeper=optuna: in a file it would search for the lowest accuracy")
        self._sweep.of_hydra = [word for word in self._typed_of_hydra if not is_of(word, _OF_THE_SWEEP)]
        self._sweep.folder = folder = Path(config.hydra.sweep.dir)
        if str(folder).startswith("~"):
            raise UserError(f"hydra.sweep.dir={folder}: give the home folder in full, or ~ becomes a folder")
        self._folder = folder.absolute()
        if not is_a(int, self._at_a_time) or self._at_a_time < 1:
            raise UserError(f"hydra.launcher.jobs={shown(self._at_a_time)} must be a whole number of at least 1")
        several = isinstance(self._gpus, Sequence) and not isinstance(self._gpus, str) and len(self._gpus)
        if self._gpus is not None and not several:
            raise UserError(f"hydra.launcher.gpus={shown(self._gpus)} must be a list such as [0,1], or left out")
        gpus = visible_gpus() if self._gpus is None else chosen_gpus([str(gpu) for gpu in self._gpus])
        self._places = places(self._at_a_time, gpus, os.environ)
        if not self._sweep.resume and (self._folder / SWEEP).exists():
            raise UserError(f"{folder} already holds a sweep: type resume=sweep, or another hydra.sweep.dir=")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs that are not done; KeyboardInterrupt if a signal came."""
        if not job_overrides:
            raise UserError("a setting of the sweep has no values: each needs at least one value")
        common = set(self._typed)
        if len(job_overrides) > 1:
            common |= set.intersection(*map(set, job_overrides))
        jobs = [self._job(initial_job_idx + i, tuple(given), common) for i, given in enumerate(job_overrides)]
        if len({job.folder for job in jobs}) < len(jobs):
            raise UserError(f"jobs of {self._sweep.folder} would share a folder; change hydra.sweep.subdir")
        with sole_use(self._folder, say):
            states = {job: self._state(job) for job in jobs}
            if initial_job_idx == 0:
                say(f"sweep in {self._sweep.folder}, {len(self._places)} at a time")
            self._write_sweep(jobs)
            pool = Pool(self._places, self._sweep.command_of, say)
            try:
                pool.run(states)
            finally:
                self._sweep.states |= pool.states
        if pool.stopped:
            raise KeyboardInterrupt
        return [self._returned(job) for job in jobs]

    def _job(self, number: int, given: tuple[str, ...], common: set[str]) -> Job:
        """Return a job, labelled by how it differs from the others, with the reason if it is refused."""
        label = " ".join([word for word in given if word not in common] or given)
        cfg = self._loader.load_sweep_config(self._config, list(given))
        with open_dict(cfg):
            cfg.hydra.job.id, cfg.hydra.job.num = str(number), number
            folder = self._folder / str(cfg.hydra.sweep.subdir)
            cfg.hydra.runtime.output_dir = str(folder)
            HydraConfig.instance().set_config(cfg)  # to which `${hydra:...}` refers
            del cfg["hydra"]
        job, settings = Job(number, folder, given, label), self._sweep.read(cfg)
        try:
            first = self._computed.setdefault(self._sweep.check(settings), number)
        except UserError as error:
            return replace(job, refusal=str(error))
        return job if first == number else replace(job, refusal=f"it would repeat job {first}")

    def _state(self, job: Job) -> JobState:
        """Return the state that a job begins with: done, skipped or waiting. UserError if its folder holds another job,
        or one that still runs."""
        before, where = read_status(job.folder), f"job {job.number} of {self._sweep.folder}"
        if is_held(job.folder):
            raise UserError(f"{where} is still running ({holder(job.folder)}): wait for it or stop it first")
        if before is not None and before.overrides != job.overrides:
            raise UserError(
                f"{where} was {' '.join(before.overrides)} and would now be {' '.join(job.overrides)}; a sampler "
                "can be resumed with hydra.sweeper.sampler.seed=<number>"
            )
        status = before or JobState("waiting", None, job.overrides, command=self._sweep.command)
        is_done = status.state == "done" or read_object(job.folder / SUMMARY).get("status") == "completed"
        if self._sweep.resume and is_done:
            return replace(status, state="done", reason=None, exit_code=0)
        return replace(status, state="waiting" if job.refusal is None else "skipped", reason=job.refusal)

    def _write_sweep(self, jobs: Sequence[Job]) -> None:
        """Write `sweep.json`: what resuming needs, and the jobs so far."""
        listed = [
            {"number": job.number, "folder": os.path.relpath(job.folder, self._folder), "overrides": job.overrides}
            for job in (*self._sweep.states, *jobs)
        ]
        # The folder and the mode are typed again when the sweep is resumed.
        of_hydra = list(dict.fromkeys(word for word in self._typed_of_hydra if not is_of(word, ("sweep.dir", "mode"))))
        about = {"command": self._sweep.command, "overrides": self._typed}
        write_object(self._folder / SWEEP, {**about, "hydra": of_hydra, "jobs": listed})

    def _returned(self, job: Job) -> JobReturn:
        """Return the result for the sweeper; a BasicSweeper, which would stop at a failed job, gets every job as
        completed."""
        status, objective = self._sweep.states[job], _OBJECTIVES[self._sweep.command]
        value = read_object(job.folder / SUMMARY).get(objective)
        is_basic, done = self._config.hydra.sweeper._target_.endswith(".BasicSweeper"), status.state == "done"
        if done and value is None and not is_basic:
            raise UserError(f"job {job.number} has no {objective} to optimise; let it evaluate: eval.every=1")
        returned = JobReturn(overrides=job.overrides, working_dir=os.getcwd(), task_name=self._sweep.command)
        returned.status = JobStatus.COMPLETED if is_basic or done else JobStatus.FAILED
        failed = UserError(f"job {job.number} {status.state}: {status.reason}")
        returned.return_value = value if is_basic or done else failed
        return returned
