"""The Hydra launcher of sweeps: each job becomes a process; jobs that cannot run are skipped and named.

Hydra makes it from its configuration (`conf/hydra/launcher/processes.yaml`) and finds it in `hydra_plugins`. What else
it needs to know about the command is the attribute `sweep` of the task function. The jobs run on this machine, or
wherever another launcher (joblib, submitit, Ray) starts them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from grpo_cli.config.overrides import overrides
from grpo_cli.runs.files import json_line, write_atomically
from grpo_cli.runs.layout import LOG, STATUS, SUMMARY, SWEEP
from grpo_cli.runs.summary import read_object
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import is_a, shown
from grpo_cli.sweep.board import Board
from grpo_cli.sweep.gpus import chosen_gpus, places, visible_gpus
from grpo_cli.sweep.pool import POLL_SECONDS, STOPPED, Pool, handled
from grpo_cli.sweep.resume import Sweep, is_of
from grpo_cli.sweep.status import Job, Status, is_done, is_running, read_status, runner, write_status

# Of Hydra's own settings, those that concern the sweep and not its jobs.
_OF_THE_SWEEP = ("launcher", "sweeper", "sweep", "run", "mode")


class ProcessLauncher(Launcher):
    """Lists the jobs, checks each, runs those that are not done, and records how they ended."""

    def __init__(self, jobs: Any, gpus: Any, theirs: Any = None) -> None:
        """`jobs` at a time on these `gpus`; or by the launcher that `theirs` configures."""
        self._at_a_time, self._gpus, self._theirs = jobs, gpus, theirs

    def setup(self, *, hydra_context: HydraContext, task_function: Callable[[Any], Any], config: DictConfig) -> None:
        self._places = self._places_here() if self._theirs is None else []
        if self._theirs is not None:
            with read_write(config), open_dict(config):
                config.hydra.launcher = config.hydra.launcher.theirs
        self._sweep: Sweep = task_function.sweep  # type: ignore[attr-defined]
        self._loader: ConfigLoader = hydra_context.config_loader
        self._config = config
        # Unresolved: `m=${n}` means each job's n.
        typed: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
        self._typed, self._typed_of_hydra = typed["task"], typed["hydra"]
        self._sweep.of_hydra = [word for word in self._typed_of_hydra if not is_of(word, _OF_THE_SWEEP)]
        self._folder = Path(config.hydra.sweep.dir).absolute()
        self._sweep.folder = Path(config.hydra.sweep.dir)
        _refuse_what_yields_nothing(config, self._typed, self._loader)
        self._refuse_another(self._folder / SWEEP)
        if self._theirs is not None:
            about: dict[str, Any] = {"hydra_context": hydra_context, "task_function": task_function, "config": config}
            self._theirs = Plugins.instance().instantiate_launcher(**about)

    def _places_here(self) -> list[dict[str, str]]:
        if not is_a(int, self._at_a_time) or self._at_a_time < 1:
            raise UserError(f"hydra.launcher.jobs={shown(self._at_a_time)} must be a whole number of at least 1")
        several = isinstance(self._gpus, Sequence) and not isinstance(self._gpus, str) and len(self._gpus)
        if self._gpus is not None and not several:
            raise UserError(f"hydra.launcher.gpus={shown(self._gpus)} must be a list such as [0,1], or left out")
        gpus = visible_gpus() if self._gpus is None else chosen_gpus([str(gpu) for gpu in self._gpus])
        return places(self._at_a_time, gpus, os.environ)

    def _refuse_another(self, trace: Path) -> None:
        if not self._sweep.resume and trace.exists():
            raise UserError(
                f"{self._sweep.folder} already holds a sweep; go on with it by resume=sweep, or choose another "
                "folder with hydra.sweep.dir=<folder>"
            )

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        self._folder.mkdir(parents=True, exist_ok=True)
        board = Board()
        common = set(self._typed)
        if len(job_overrides) > 1:
            common |= set.intersection(*map(set, job_overrides))
        jobs = [self._job(initial_job_idx + i, tuple(given), common) for i, given in enumerate(job_overrides)]
        self._refuse_what_is_there(jobs)
        if initial_job_idx == 0:
            name = self._config.hydra.runtime.choices["hydra/launcher"]
            how = f"{len(self._places)} at a time" if self._theirs is None else f"by hydra/launcher={name}"
            board.say(f"sweep in {self._sweep.folder}, {how}")
        self._list(jobs)
        to_run = self._sort_out(jobs, board)
        try:
            self._run_here(to_run, board) if self._theirs is None else self._run_elsewhere(to_run, board)
        finally:
            for job in jobs:
                status = read_status(job.folder)
                if status is not None:
                    self._sweep.outcomes[job.number] = status
        return [self._returned(job) for job in jobs]

    def _job(self, number: int, given: tuple[str, ...], common: set[str]) -> Job:
        """A job, labelled by how it differs from the others, with the reason if it is refused."""
        label = " ".join([word for word in given if word not in common] or given)
        cfg = self._loader.load_sweep_config(self._config, list(given))
        with open_dict(cfg):
            cfg.hydra.job.id, cfg.hydra.job.num = str(number), number
            with _current(cfg):
                folder = self._folder / str(OmegaConf.select(cfg, "hydra.sweep.subdir"))
            with read_write(cfg.hydra.runtime):
                cfg.hydra.runtime.output_dir = str(folder)
            with _current(cfg):
                del cfg["hydra"]
                steps = OmegaConf.select(cfg, "train.steps") if self._sweep.command == "train" else None
                job = Job(number, folder, given, label, steps)
                try:
                    self._sweep.check(cfg)
                except UserError as error:
                    return replace(job, refusal=str(error))
        return job

    def _sort_out(self, jobs: Sequence[Job], board: Board) -> list[Job]:
        """Write every job's status file, and return the jobs to run."""
        to_run = []
        for job in jobs:
            before = read_status(job.folder)
            status = before or Status("waiting", None, job.overrides, command=self._sweep.command)
            if self._sweep.resume and is_done(job.folder):
                status = replace(status, state="done", reason=None, exit_code=0, pid=None, host=None)
            elif job.refusal is not None:
                status = replace(status, state="skipped", reason=job.refusal)
            else:
                status = replace(status, state="waiting", reason=None, pid=None, host=None)
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
            if is_running(job.folder):
                raise UserError(
                    f"job {job.number} of {self._sweep.folder} is still running ({runner(job.folder)}), see "
                    f"{job.folder / LOG}: wait for it or stop it first"
                )
            self._refuse_another(job.folder / STATUS)
            before = read_status(job.folder)
            if before is not None and [*before.overrides] != [*job.overrides]:
                raise UserError(
                    f"job {job.number} of {self._sweep.folder} was {' '.join(before.overrides)} and would now be "
                    f"{' '.join(job.overrides)}. A sampler without a fixed seed cannot be resumed: start the sweep "
                    "with hydra.sweeper.sampler.seed=<number>"
                )

    def _list(self, jobs: Sequence[Job]) -> None:
        """Write `sweep.json`: what resuming needs, and the jobs so far."""
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
            # The folder and the mode are typed again when the sweep is resumed.
            "hydra": list(dict.fromkeys(w for w in self._typed_of_hydra if not is_of(w, ("sweep.dir", "mode")))),
        }
        write_atomically(path, f"{json_line({**asked, 'jobs': [*ours, *rest]}, indent=2)}\n".encode())

    def _returned(self, job: Job) -> JobReturn:
        """The result for the sweeper. Hydra's basic one stops at a failure, so it is told that all completed."""
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
            raise UserError(f"job {job.number} has no {objective} to optimise; let it evaluate: eval.every=1")
        return returned

    def _run_here(self, jobs: Sequence[Job], board: Board) -> None:
        """Run the jobs and update their status files. KeyboardInterrupt if asked to stop."""
        pool = Pool(self._places, self._sweep.command_of, self._sweep.command, board)
        board.start()
        try:
            pool.run(jobs)
        finally:
            board.close()
        if pool.stopped:
            raise KeyboardInterrupt

    def _run_elsewhere(self, jobs: Sequence[Job], board: Board) -> None:
        """The same through the other launcher, whose processes call `run_alone`."""
        # A job's folder must depend neither on how the launcher counts nor on its working directory.
        place = {job: os.path.relpath(job.folder, self._folder) for job in jobs}
        of_folder = {"hydra.sweep.dir": str(self._folder)}
        given = [[*job.overrides, *overrides({**of_folder, "hydra.sweep.subdir": place[job]})] for job in jobs]
        state, reason = "failed", f"its launcher reports that it ended, but {self._folder} here does not"
        try:
            with handled(_interrupt):
                if jobs:
                    self._theirs.launch(given, jobs[0].number)
        except (KeyboardInterrupt, SystemExit):
            state, reason = "waiting", STOPPED
            raise KeyboardInterrupt from None
        except Exception as error:  # from another program: it may be anything
            reason = f"{type(error).__name__}: {error}"
        finally:
            for job in jobs:
                self._note_the_end(job, state, reason, board)

    def _note_the_end(self, job: Job, state: str, reason: str, board: Board) -> None:
        """Record the end of a job whose own process died before it could."""
        status = read_status(job.folder)
        assert status is not None, "every job was given one"
        left = status.state == "running" or (status.state, state) == ("waiting", "failed")
        if left and not is_running(job.folder):
            if is_done(job.folder):
                state, reason = "done", ""
            status = replace(status, state=state, reason=reason or None, pid=None, host=None)
            write_status(job.folder, status)
            board.changed(job, status)


def run_alone(sweep: Sweep, folder: Path) -> None:
    """Run the job of this folder in its own process, on the machine that another launcher chose.

    Waits for a process that a killed worker left behind.
    """
    job = next(job for job in sweep.jobs.values() if job.folder == folder)
    while is_running(folder):
        time.sleep(POLL_SECONDS)
    if is_done(folder):
        return
    pool = Pool([{}], sweep.command_of, sweep.command, Board())
    pool.run([job])
    if pool.stopped:
        raise SystemExit(130)


class AroundLaunchers(Callback):
    """A Hydra callback (`conf/_run.yaml`) that wraps another program's launcher in ours."""

    def on_multirun_start(self, config: DictConfig, **about: Any) -> None:
        theirs, ours = config.hydra.launcher, f"hydra_plugins.grpo_processes.{ProcessLauncher.__name__}"
        if theirs._target_ != ours:
            with read_write(config), open_dict(config):
                about = {"_target_": ours, "_recursive_": False, "jobs": None, "gpus": None, "theirs": theirs}
                config.hydra.launcher = about


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _refuse_what_yields_nothing(config: DictConfig, typed: Sequence[str], loader: ConfigLoader) -> None:
    params = config.hydra.sweeper.get("params") or {}
    words = [*typed, *(f"{key}={value}" for key, value in params.items())]
    for override in OverridesParser.create(config_loader=loader).parse_overrides(words):
        if override.is_discrete_sweep() and next(override.sweep_string_iterator(), None) is None:
            raise UserError(f"{override.input_line} has no values: a sweep needs at least one value of each setting")


@contextmanager
def _current(cfg: DictConfig) -> Iterator[None]:
    """Let `${hydra:...}` refer to this config."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(cfg)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before
