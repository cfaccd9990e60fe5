"""Runs a command with the settings that are composed: a run, a sweep, or one message about a mistake."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import hydra
import typer
from omegaconf import DictConfig, OmegaConf

from grpo_cli.cli.mistakes import explained, fail, unusable
from grpo_cli.config.choices import config_dir
from grpo_cli.config.compose import composed, new_folder_names, of_hydra, read_command
from grpo_cli.config.overrides import quoted
from grpo_cli.config.recorded import Command, primary, recorded_run
from grpo_cli.support.errors import UserError, refuse
from grpo_cli.sweep.resume import Sweep, sweep_of

MOST_FAILED = 100  # exit codes above 125 have other meanings to the shell


def hand_over(
    command: str, words: Sequence[str], is_sweep: bool = False, only_print: bool = False, own: Path | None = None
) -> None:
    """Run the command with its settings; in a sweep, once for every combination that passes its check."""
    with _current_folder_on_the_path():
        words = with_checkpoint(words) if command == "eval" else words
        if own is not None:
            if not own.is_dir():
                raise UserError(f"--config-dir={own} is not a folder: name the one that holds your choices")
            words = [f"hydra.searchpath=[file://{own.absolute()}]", *words]
        refuse([*unusable(command, words, is_sweep)])
        if is_sweep and not only_print:
            _sweep(command, words)
            return
        with explained(command, words):
            found = composed(command, words)
        typer.echo(OmegaConf.to_yaml(found.cfg)) if only_print else _run(found)


def with_checkpoint(words: Sequence[str]) -> list[str]:
    """Return the words of `grpo eval`, of which the first may be a folder, with `checkpoint=<folder>`."""
    first, *rest = words or [""]
    is_setting = first[:1] in ("", "+", "=") or "=" in first.partition("/")[0] or first.startswith("hydra/")
    if is_setting or (first[:1] == "~" and first[:2] != "~/"):
        return list(words)
    return [f"checkpoint={quoted(first)}", *rest]


@contextmanager
def _current_folder_on_the_path() -> Iterator[None]:
    """Let modules of the current folder be imported; last, so that none hides an installed one."""
    before = list(sys.path)
    sys.path += [os.getcwd()] * (os.getcwd() not in sys.path)
    try:
        yield
    finally:
        sys.path[:] = before


def _run(command: Command) -> Any:
    """Read a command's settings, and then load PyTorch to do its work."""
    settings = read_command(command)
    from grpo_cli.cli.jobs import JOBS

    return JOBS[command.name](command, settings)


def _check(command: Command) -> None:
    """UserError for settings that the command would refuse: a sweep's job is checked before it starts."""
    settings = read_command(command)
    from grpo_cli.config.check import check

    check(settings)


def _sweep(command: str, words: Sequence[str]) -> None:
    """Let Hydra run the sweep, and end with its result."""
    words, sweep = sweep_of(command, words, lambda cfg: _check(of_hydra(command, cfg, run.record)))
    run = recorded_run(command, words)
    config, words = primary(command, run, words)
    started = []

    def job(cfg: DictConfig) -> Any:
        """Run a job here, for a launcher of Hydra's. Ours starts processes and needs only `job.sweep`."""
        started.append(cfg)
        return _run(of_hydra(command, cfg, run.record))

    job.sweep, before = sweep, sys.argv  # type: ignore[attr-defined]  # functions may have attributes
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors are explained here
    sys.argv = [f"grpo {command}", "--multirun", *words]
    new_folder_names()
    try:
        with explained(command, words, lambda: not (started or sweep.states)):
            hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config)(job)()
    except KeyboardInterrupt:
        if not sweep.states:
            raise
        _end(sweep, 130)
    except ValueError:
        if not sweep.states or sweep.counts()["done"]:
            raise  # without any result a sweeper has no best one, and reports that itself
    finally:
        sys.argv = before
    if sweep.states:
        _end(sweep, _conclude(sweep))


def _conclude(sweep: Sweep) -> int:
    """Compare the jobs of a finished sweep. Return its exit code: the number of failed jobs; for profiles 2 if one is
    missing."""
    done = sweep.done()
    if sweep.command == "eval" and done:
        from grpo_cli.report.side_by_side import show_evaluations

        show_evaluations([(job.label, job.folder) for job in done])
    if sweep.command != "profile":
        return min(sweep.counts()["failed"], MOST_FAILED)
    if done:
        from grpo_cli.report.side_by_side import show_profiles

        show_profiles([(job.label, job.folder) for job in done])
    return 0 if len(done) == len(sweep.states) else 2


def _end(sweep: Sweep, code: int) -> NoReturn:
    """Print how a sweep ended and exit with this code; with 2 and the reasons, if no job could be run."""
    typer.echo(sweep.summary())
    if sweep.counts()["skipped"] == len(sweep.states):
        reasons = dict.fromkeys(str(status.reason) for status in sweep.states.values())
        fail("\n".join(["no combination can be run:", *reasons]))
    raise typer.Exit(code)
