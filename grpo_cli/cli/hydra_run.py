"""Runs a command's job with the settings that Hydra composes: a run, a sweep, or one message about a mistake.

Hydra is imported in functions, so that help and completion are immediate.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from grpo_cli.cli.mistakes import FLAGS_WITH_VALUE, explained, fail, refusals, unusable
from grpo_cli.runs.layout import OUTPUTS
from grpo_cli.support.errors import UserError, refuse

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from grpo_cli.sweep.resume import Sweep

MOST_FAILED = 100  # exit codes above 125 have other meanings to the shell
SWEEP = {"-m", "--multirun"}


def hand_over(command: str, arguments: Sequence[str]) -> None:
    """Run the command's job with the configuration that Hydra composes; in a sweep, once for every combination that
    passes its check."""
    from grpo_cli.sweep.resume import sweep_of

    with refusals():
        flags, words = sorted_out(arguments)
        refuse([*unusable(command, flags, words)])
        if "--help" not in flags:
            words = _with_those_of_a_run(command, flags, words)
        words, sweep = sweep_of(command, flags, words, partial(_check, command))
        called = _Called(sweep, words)
    with _explained(command, words, called), _command_line(command, words):
        _hydra(command, called)
    if called.refused:
        fail(called.refused)
    if sweep.outcomes:
        with refusals():
            code = _conclude(sweep)
        _end(sweep, code)


def _with_those_of_a_run(command: str, flags: Sequence[str], words: list[str]) -> list[str]:
    """Return the words after those of the run that `resume=` or `checkpoint=` names."""
    from grpo_cli.config.recorded import words_to_evaluate, words_to_resume

    if command == "train":
        return words_to_resume(words, bool(SWEEP & {*flags}))
    return words_to_evaluate(words) if command == "eval" else words


def with_checkpoint(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `grpo eval` with a folder among them as `checkpoint=<folder>`. UserError for more than
    one."""
    from grpo_cli.config.overrides import overrides, value_of

    words = list(arguments)
    for place, word in enumerate(words):
        key, equals, _ = word.partition("=")
        is_place = re.match(r"[^-~=+]|~/", word) and (not equals or ("/" in key and not key.startswith("hydra/")))
        if is_place and not (place and words[place - 1] in FLAGS_WITH_VALUE):
            (words[place],) = (given.lstrip("+") for given in overrides({"checkpoint": word}))
    named = [str(value_of("checkpoint", [word])) for word in words if word.startswith("checkpoint=")]
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)}: grpo eval takes one of them; evaluate each by a command of its own")
    return words


def sorted_out(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return flags (with their values) and overrides, since Hydra's parser wants all overrides together. UserError for
    an override without a key, which Hydra would ignore."""
    for word in arguments:
        if word.startswith("="):
            raise UserError(f"{word} cannot be read: write key=value or group=choice")
    words = [word for word in arguments if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    return [word for word in arguments if word not in words], words


def _check(command: str, cfg: DictConfig) -> None:
    from grpo_cli.cli.jobs import check

    check(command, cfg)


def _conclude(sweep: Sweep) -> int:
    """Compare the jobs of a finished sweep. Returns its exit code: the number of failed jobs; for profiles 2 if one is
    missing."""
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
    from hydra._internal.hydra import Hydra
    from omegaconf import OmegaConf

    from grpo_cli.config.choices import config_dir

    # It composes everything, once more than needed, for a mode that -m says.
    Hydra.get_mode = lambda self, config_name, overrides: None  # type: ignore[method-assign]

    # Cached, so that a run's folder stays the same each time its config is read, and a sweep's jobs share theirs.
    OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(2), use_cache=True, replace=True)
    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=command)(task)()


class _Called:
    """The function that Hydra calls: runs the job and keeps its refusal.

    Our launcher starts processes and needs only the `sweep`. Other launchers call it where a job is to run.
    """

    def __init__(self, sweep: Sweep, words: Sequence[str]) -> None:
        self.sweep = sweep
        self.started = False
        self.there_before = _folders_before(OUTPUTS / sweep.command, words)
        self.refused: UserError | None = None

    def __call__(self, cfg: DictConfig) -> Any:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        from grpo_cli.cli.jobs import JOBS

        self.started = True
        try:
            return JOBS[self.sweep.command](cfg)
        except UserError as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise  # the launcher may be in another process
            self.refused = error  # raised through Hydra, it would get Hydra's own message
            return None
        except SystemExit as error:  # from code in a custom part
            raise RuntimeError(f"the run was ended by sys.exit({error.code}) in code that it called") from error
        finally:
            _remove_if_empty(Path(HydraConfig.get().runtime.output_dir), self.there_before)


def _folders_before(usual: Path, words: Sequence[str]) -> set[Path]:
    """Return the run's folder and those above that already exist. UserError if `hydra.run.dir` names none."""
    from grpo_cli.config.overrides import value_of

    named = value_of("hydra.run.dir", words)
    if named is not None and not named.strip():
        raise UserError("hydra.run.dir is empty: name the folder that the run is to write into (. is the current one)")
    folder = Path(named or usual).absolute()
    return {path for path in (folder, *folder.parents) if path.exists()}


def _remove_if_empty(folder: Path, there_before: set[Path]) -> None:
    """Remove the empty folders that Hydra made for a run that was refused."""
    for made in (folder, *folder.parents):
        if made in there_before or not made.is_dir() or any(made.iterdir()):
            return
        made.rmdir()


@contextmanager
def _explained(command: str, words: Sequence[str], called: _Called) -> Iterator[None]:
    """End the program with one message for a mistake; bugs keep their traceback."""
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
        fail(explained(error, command, words))
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
    """Set up the process for Hydra: `sys.argv`, the current directory on the path, and full errors."""
    argv, path, full_error = sys.argv, list(sys.path), os.environ.get("HYDRA_FULL_ERROR")
    flags, words = sorted_out(arguments)
    sys.argv = [f"grpo {command}", *flags, *words]
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
