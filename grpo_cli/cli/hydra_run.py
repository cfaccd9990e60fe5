"""Hands a command's arguments to Hydra: the result is a run, a sweep, or one message about a mistake.

Hydra is imported lazily, so that help and completion are immediate.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from grpo_cli.cli.arguments import sorted_out
from grpo_cli.cli.mistakes import explained, fail, refusals, unusable
from grpo_cli.runs.layout import OUTPUTS
from grpo_cli.support.errors import UserError, refuse

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from grpo_cli.sweep.resume import Sweep

MOST_FAILED = 100  # exit codes above 125 have other meanings to the shell


def hand_over(command: str, arguments: Sequence[str]) -> None:
    """Run the command's job with the configuration that Hydra composes; in a sweep, once for every combination that
    passes its check."""
    from grpo_cli.sweep.resume import sweep_of

    with refusals():
        refuse([*unusable(command, *sorted_out(arguments))])
        arguments, sweep = sweep_of(command, *sorted_out(arguments), partial(_check, command))
        called = _Called(sweep, arguments)
    with _said_in_our_words(command, arguments, called), _command_line(command, arguments):
        _hydra(command, called)
    if called.refused:
        fail(called.refused)
    if sweep.outcomes:
        with refusals():
            code = _conclude(sweep)
        _end(sweep, code)


def _check(command: str, cfg: DictConfig) -> None:
    """UserError for settings that the command's job would refuse."""
    from grpo_cli.cli.jobs import CHECKS

    CHECKS[command](cfg)


def _run(command: str, cfg: DictConfig) -> Any:
    from grpo_cli.cli import jobs

    return {"train": jobs.train, "eval": jobs.evaluate, "profile": jobs.profile}[command](cfg)


def _conclude(sweep: Sweep) -> int:
    """The exit code of a finished sweep: the number of failed jobs; for profiles 2 if one is missing. These and
    evaluations are compared here."""
    done = sweep.done()
    if sweep.command == "eval" and done:
        from grpo_cli.report.evaluations import show_evaluations

        show_evaluations([(job.label, job.folder) for job in done])
    if sweep.command != "profile":
        return min(sweep.counts()["failed"], MOST_FAILED)
    if done:
        from grpo_cli.report.profiles import compare_profiles

        assert sweep.folder is not None, "the launcher has written there"
        compare_profiles([(job.label, job.folder) for job in done], sweep.folder)
    return 0 if len(done) == len(sweep.jobs) else 2


def _hydra(command: str, task: _Called) -> None:
    """Let Hydra read the command line, and compose a run or a sweep of it."""
    import hydra
    from omegaconf import OmegaConf

    from grpo_cli.config.choices import config_dir

    # Cached, so that a run's folder stays the same each time its config is read, and a sweep's jobs share theirs.
    OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(2), use_cache=True, replace=True)
    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=command)(task)()


class _Called:
    """The function that Hydra calls: runs the job and keeps its refusal.

    Our launcher starts processes and needs only the `sweep`. Other launchers call it where a job is to run.
    """

    def __init__(self, sweep: Sweep, arguments: Sequence[str]) -> None:
        self.sweep = sweep
        self.started = False
        self.there_before = _folders_before(OUTPUTS / sweep.command, arguments)
        self.refused: UserError | None = None

    def __call__(self, cfg: DictConfig) -> Any:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        self.started = True
        try:
            return _run(self.sweep.command, cfg)
        except UserError as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise  # the launcher may be in another process
            self.refused = error  # raised through Hydra, it would get Hydra's own message
            return None
        except SystemExit as error:  # from code in a custom part
            raise RuntimeError(f"the run was ended by sys.exit({error.code}) in code that it called") from error
        finally:
            _leave_no_empty_folder(Path(HydraConfig.get().runtime.output_dir), self.there_before)


def _folders_before(usual: Path, arguments: Sequence[str]) -> set[Path]:
    """The folders above the run's that already exist, and its own if so. UserError if `hydra.run.dir` names none."""
    from grpo_cli.config.overrides import value_of

    named = value_of("hydra.run.dir", arguments)
    if named is not None and not named.strip():
        raise UserError("hydra.run.dir is empty: name the folder that the run is to write into (. is the current one)")
    folder = Path(named or usual).absolute()
    return {path for path in (folder, *folder.parents) if path.exists()}


def _leave_no_empty_folder(folder: Path, there_before: set[Path]) -> None:
    """Hydra creates a run's folder before the run can be refused: remove those that are empty."""
    for made in (folder, *folder.parents):
        if made in there_before or not made.is_dir() or any(made.iterdir()):
            return
        made.rmdir()


@contextmanager
def _said_in_our_words(command: str, arguments: Sequence[str], called: _Called) -> Iterator[None]:
    """Turns mistakes into messages, and says how to resume a sweep that was stopped. Bugs keep their traceback."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    sweep = called.sweep
    try:
        yield
    except UserError as error:
        fail(error)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        if called.started or sweep.outcomes:
            raise
        fail(explained(error, command, arguments))
    except KeyboardInterrupt:
        if not sweep.outcomes:
            raise
        _end(sweep, 130)
    except ValueError:
        if not sweep.outcomes or sweep.counts()["done"]:
            raise  # without any result a sweeper has no best one, and reports that itself


def _end(sweep: Sweep, code: int) -> NoReturn:
    """Print how a sweep ended and exit with this code; with 2 and the reasons, if no job could be run."""
    typer.echo(sweep.summary())
    if sweep.counts()["skipped"] == len(sweep.outcomes):
        reasons = dict.fromkeys(str(status.reason) for status in sweep.outcomes.values())
        fail("\n".join(["no combination can be run:", *reasons]))
    raise typer.Exit(code)


@contextmanager
def _command_line(command: str, arguments: Sequence[str]) -> Iterator[None]:
    """Sets up the process for Hydra: `sys.argv`, the current directory on the path, and full errors."""
    argv, path, full_error = sys.argv, list(sys.path), os.environ.get("HYDRA_FULL_ERROR")
    flags, overrides = sorted_out(arguments)
    sys.argv = [f"grpo {command}", *flags, *overrides]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no file there shadows an installed module
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        if full_error is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
