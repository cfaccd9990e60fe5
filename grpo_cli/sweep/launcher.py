"""The launcher that Hydra hands a sweep's jobs to: each becomes a process, what cannot run is skipped and said.

Hydra makes launchers from its configuration (`conf/hydra/launcher/processes.yaml`) and finds this one in
`hydra_plugins`. What else it needs to know of the command comes as the attribute `sweep` of the function that Hydra
would call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from grpo_cli.config.overrides import overrides
from grpo_cli.errors import UserError
from grpo_cli.formatting import is_a, shown
from grpo_cli.runs.files import json_line, write_atomically
from grpo_cli.runs.layout import SUMMARY, SWEEP
from grpo_cli.runs.summary import read_object
from grpo_cli.sweep.board import Board
from grpo_cli.sweep.gpus import places, visible_gpus
from grpo_cli.sweep.pool import Pool
from grpo_cli.sweep.resume import Sweep, is_of, names_the_folder
from grpo_cli.sweep.status import Job, Status, is_done, is_running, read_status, resumes_from, write_status

# Of Hydra's own settings, those that concern the sweep and not its jobs.
_OF_THE_SWEEP = ("launcher", "sweeper", "sweep", "run", "mode")


class ProcessLauncher(Launcher):
    def __init__(self, jobs: Any, gpus: Any) -> None:
        self._at_a_time, self._gpus = jobs, gpus

    def setup(self, *, hydra_context: HydraContext, task_function: Callable[[Any], Any], config: DictConfig) -> None:
        if not is_a(int, self._at_a_time) or self._at_a_time < 1:
            raise UserError(f"hydra.launcher.jobs={shown(self._at_a_time)} must be a whole number of at least 1")
        several = isinstance(self._gpus, Sequence) and not isinstance(self._gpus, str) and len(self._gpus)
        if self._gpus is not None and not several:
            raise UserError(f"hydra.launcher.gpus={shown(self._gpus)} must be a list such as [0,1], or left out")
        gpus = visible_gpus() if self._gpus is None else [str(gpu) for gpu in self._gpus]
        self._places = places(self._at_a_time, gpus, os.environ)
        self._sweep: Sweep = task_function.sweep  # type: ignore[attr-defined]
        self._loader: ConfigLoader = hydra_context.config_loader
        self._config = config
        # Unresolved: `m=${n}` means each job's n.
        typed: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
        self._typed, self._typed_of_hydra = typed["task"], typed["hydra"]
        self._of_hydra = [word for word in self._typed_of_hydra if not _concerns_the_sweep(word)]
        self._folder = Path(config.hydra.sweep.dir).absolute()
        self._sweep.folder = Path(config.hydra.sweep.dir)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        self._folder.mkdir(parents=True, exist_ok=True)
        board = Board()
        common = set(self._typed)
        if len(job_overrides) > 1:
            common |= set.intersection(*map(set, job_overrides))
        jobs = [self._job(initial_job_idx + i, tuple(words), common) for i, words in enumerate(job_overrides)]
        pool = Pool(self._places, self._command_of, self._sweep.command, board)
        self._refuse_what_is_there(jobs)
        if initial_job_idx == 0:
            board.say(f"sweep in {self._sweep.folder}, {len(self._places)} at a time")
        self._list(jobs)
        to_run = self._sort_out(jobs, board)
        board.start()
        try:
            pool.run(to_run)
        finally:
            board.close()
            for job in jobs:
                status = read_status(job.folder)
                if status is not None:
                    self._sweep.outcomes[job.number] = status
        if pool.stopped:
            raise KeyboardInterrupt
        return [self._returned(job) for job in jobs]

    def _job(self, number: int, words: tuple[str, ...], common: set[str]) -> Job:
        """A job, called by what it has not in common with the others, if anything, with the reason if it is refused."""
        label = " ".join([word for word in words if word not in common] or words)
        cfg = self._loader.load_sweep_config(self._config, list(words))
        with open_dict(cfg):
            cfg.hydra.job.id, cfg.hydra.job.num = str(number), number
            with _current(cfg):
                folder = self._folder / str(OmegaConf.select(cfg, "hydra.sweep.subdir"))
            with read_write(cfg.hydra.runtime):
                cfg.hydra.runtime.output_dir = str(folder)
            with _current(cfg):
                del cfg["hydra"]
                steps = OmegaConf.select(cfg, "train.steps") if self._sweep.command == "train" else None
                job = Job(number, folder, words, label, steps)
                try:
                    self._sweep.check(cfg)
                except UserError as error:
                    return replace(job, refusal=str(error))
        return job

    def _sort_out(self, jobs: Sequence[Job], board: Board) -> list[Job]:
        """Give every job its status file, and return those that are to be run."""
        to_run = []
        for job in jobs:
            before = read_status(job.folder)
            status = before or Status("waiting", None, job.overrides, command=self._sweep.command)
            if self._sweep.resume and is_done(job.folder):
                status = replace(status, state="done", reason=None, exit_code=0)
            elif job.refusal is not None:
                status = replace(status, state="skipped", reason=job.refusal)
            else:
                status = replace(status, state="waiting", reason=None)
                to_run.append(job)
            if status != before:
                write_status(job.folder, status)
            board.changed(job, status)
        return to_run

    def _refuse_what_is_there(self, jobs: Sequence[Job]) -> None:
        first: dict[Path, Job] = {}
        for job in jobs:
            other = first.setdefault(job.folder, job)
            if other is not job:
                raise UserError(
                    f"jobs {other.number} and {job.number} would share {job.folder}; choose a hydra.sweep.subdir that "
                    "differs, such as ${hydra.job.num}"
                )
            before = read_status(job.folder)
            if before is None:
                continue
            if not self._sweep.resume:
                raise UserError(
                    f"{self._sweep.folder} already holds a sweep; go on with it by resume=sweep, or choose another "
                    "folder with hydra.sweep.dir=<folder>"
                )
            if before.overrides != job.overrides:
                raise UserError(
                    f"job {job.number} of {self._sweep.folder} was {' '.join(before.overrides)} and would now be "
                    f"{' '.join(job.overrides)}. A sampler that draws anew cannot be resumed: start the sweep with "
                    "hydra.sweeper.sampler.seed=<number>"
                )
            if is_running(job.folder):
                raise UserError(
                    f"job {job.number} of {self._sweep.folder} is still running, see {job.folder / before.log}: "
                    "wait for it or stop it first"
                )

    def _list(self, jobs: Sequence[Job]) -> None:
        """Write `sweep.json`: all that is needed to go on, and the jobs so far."""
        path = self._folder / SWEEP
        before = read_object(path).get("jobs", [])
        self._sweep.jobs |= {job.number: job for job in jobs}
        ours = [
            {"number": job.number, "folder": os.path.relpath(job.folder, self._folder), "overrides": job.overrides}
            for job in self._sweep.jobs.values()
        ]
        rest = [job for job in before if job["number"] not in self._sweep.jobs]
        asked = {
            "command": self._sweep.command,
            "flags": list(self._sweep.flags),
            "overrides": self._typed,
            "hydra": list(dict.fromkeys(word for word in self._typed_of_hydra if not _of_this_time(word))),
        }
        write_atomically(path, f"{json_line({**asked, 'jobs': [*ours, *rest]}, indent=2)}\n".encode())

    def _command_of(self, job: Job) -> list[str]:
        """What one would type to run the job by hand."""
        of_hydra = [*self._of_hydra, f"hydra.job.num={job.number}", f"hydra.job.id={job.number}"]
        checkpoint = resumes_from(job.folder, job.steps)
        if checkpoint is None:
            words = [*job.overrides, *overrides({"hydra.run.dir": str(job.folder)})]
        else:
            words = [word.lstrip("+") for word in overrides({"resume": str(checkpoint)})]
        return [sys.executable, "-P", "-m", "grpo_cli", self._sweep.command, *self._sweep.flags, *of_hydra, *words]

    def _returned(self, job: Job) -> JobReturn:
        """What the sweeper is told. Hydra's own would stop at the first failure, so it only hears of an end."""
        status = self._sweep.outcomes[job.number]
        returned = JobReturn(overrides=job.overrides, working_dir=os.getcwd(), task_name=self._sweep.command)
        optimises = not self._config.hydra.sweeper._target_.endswith(".BasicSweeper")
        if status.state != "done" and optimises:
            returned.status = JobStatus.FAILED
            returned.return_value = UserError(f"job {job.number} {status.state}: {status.reason}")
            return returned
        returned.status = JobStatus.COMPLETED
        returned.return_value = read_object(job.folder / SUMMARY).get(self._sweep.objective)
        if returned.return_value is None and optimises:
            objective = self._sweep.objective
            raise UserError(f"job {job.number} has no {objective} to be optimised; let it evaluate: eval.every=1")
        return returned


@contextmanager
def _current(cfg: DictConfig) -> Iterator[None]:
    """Let `${hydra:...}` mean this config's."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(cfg)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def _of_this_time(word: str) -> bool:
    """Whether an override is given anew when the sweep is resumed."""
    return names_the_folder(word) or is_of(word, ("mode",))


def _concerns_the_sweep(word: str) -> bool:
    return is_of(word, _OF_THE_SWEEP)
