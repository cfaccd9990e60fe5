"""Runs a command with the settings that are composed: a run, a sweep, or one message about a mistake."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import typer
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from grpo_cli.cli.mistakes import as_text, unknown, unusable, without_effect
from grpo_cli.config.choices import config_dir
from grpo_cli.config.compose import composed, new_folder_names, of_hydra, settings_from
from grpo_cli.config.overrides import key_of, leaves, quoted
from grpo_cli.config.recorded import Command, start_of
from grpo_cli.support.errors import UserError, refuse
from grpo_cli.support.terminal import to_stderr
from grpo_cli.sweep.resume import Sweep, sweep_of

_TEX = "abla|atural|cong|earrow|e|eg|eq|ewcommand|ewline|exists|geq|gtr|i|leq|less|mid|ot|otin|u|warrow"


def hand_over(command: str, words: Sequence[str], is_sweep: bool, only_print: bool, own: Path | None) -> None:
    """Run the command with its settings; in a sweep, once for every combination that passes its check."""
    path = list(sys.path)
    # Modules of the current folder can be imported; last, so that none hides an installed one.
    sys.path += [os.getcwd()] * (os.getcwd() not in sys.path)
    try:
        words = [*map(with_line_breaks, with_checkpoint(words) if command == "eval" else words)]
        if own is not None:
            words = [f"hydra.searchpath=[{quoted(f'file://{own.absolute()}')}]", *words]
        if is_sweep and only_print:
            raise UserError("--cfg prints the settings of one run: leave -m out, and give each setting one value")
        refuse([*unusable(words, is_sweep)])
        if is_sweep:
            _sweep(command, words)
            return
        with readable_errors(command, words):
            found = composed(command, words)
        if HydraConfig.get().sweeper.get("params"):
            to_stderr("warning: this experiment is a sweep; without -m its values of hydra.sweeper.params are ignored")
        typer.echo(OmegaConf.to_yaml(found.cfg)) if only_print else _run(found)
    finally:
        sys.path[:] = path


def with_checkpoint(words: Sequence[str]) -> list[str]:
    """Return the words of `grpo eval`, of which the first may be a folder, with `checkpoint=<folder>`."""
    first, *rest = words or [""]
    if re.match(r"[-+=]|~(?!/)|[^/]*=|hydra/|$", first):
        return list(words)
    return [f"checkpoint={quoted(first)}", *rest]


def with_line_breaks(word: str) -> str:
    """Return a word with line breaks where its text has backslash and n: Hydra has no other way to type them. Commands
    of TeX, which prompts may hold, stay."""
    is_text = key_of(word) in ("sampling.stop", "task.template", "task.system_prompt")
    return re.sub(rf"(?<!\\)\\n(?!(?:{_TEX})\b)", "\n", word) if is_text else word


@contextmanager
def readable_errors(command: str, words: Sequence[str], composing: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Turn an error of Hydra into a UserError: every unknown key and choice, or else what Hydra found. Once it is no
    longer `composing`, an error is a bug, and keeps its traceback."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, AssertionError) as error:
        if not composing():
            raise
        refuse([*unknown(command, words)])
        text = f"{' '.join(f'{word:.60}' for word in words)}: {str(error) or 'unusable'}".split("\n\n")[0].strip()
        if isinstance(error, OverrideParseException):
            word = str(error.override)
            text = f"{word} cannot be read: {as_text(word) or 'write key=value or group=choice, without spaces'}"
        elif sweep := re.match(r"(?:Ambiguous .*?|Sweep parameters) '(.+?)'(?:\n| requires)", str(error), re.S):
            a_list = shlex.quote("{}=[{}]".format(*sweep[1].split("=", 1)))
            text = f"{sweep[1]} is a sweep: add -m; a list is typed {a_list}, {as_text(sweep[1])}"
        raise UserError(text) from error


def _run(command: Command) -> Any:
    """Read a command's settings, and then load PyTorch to do its work."""
    settings = settings_from(command)
    values = leaves("", OmegaConf.to_container(command.cfg, resolve=True))
    for line in without_effect(values, [*map(key_of, command.typed)]):
        to_stderr(f"warning: {line}")
    from grpo_cli.cli.jobs import JOBS, fitted

    return JOBS[command.name](command, fitted(command, settings) if command.name == "train" else settings)


def _sweep(command: str, words: Sequence[str]) -> None:
    """Let Hydra run the sweep, compare its jobs, and exit with the number of failed ones."""

    def read_job(cfg: DictConfig) -> Any:
        return settings_from(of_hydra(command, cfg, start.record))

    def check_job(settings: Any) -> str:
        from grpo_cli.config.prepare import build_and_check, effective

        build_and_check(settings)
        return repr(effective(settings))

    def job(cfg: DictConfig) -> Any:
        """Run a job here, for a launcher of Hydra's. Ours starts processes and needs only `job.sweep`."""
        started.append(cfg)
        return _run(of_hydra(command, cfg, start.record))

    words, sweep = sweep_of(command, words, read_job, check_job)
    started, is_interrupted = list[DictConfig](), False
    job.sweep = sweep  # type: ignore[attr-defined]  # functions may have attributes
    new_folder_names()
    try:
        with readable_errors(command, words, lambda: not (started or sweep.states)):
            start = start_of(command, words)
            with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
                program: Any = GlobalHydra.instance().hydra
                named = [word for word in words if key_of(word) == "checkpoint"]  # each job reads it again
                program.multirun(start.config, job, [*start.words, *named])
    except KeyboardInterrupt:
        is_interrupted = True
    except ValueError:  # without any result a sweeper has no best one, and reports that itself
        if not sweep.states or sweep.counts()["done"]:
            raise
    if sweep.states:
        _show(sweep)
    failed = min(sweep.counts()["failed"], 100)  # codes above 125 have other meanings to the shell
    raise typer.Exit(130 if is_interrupted else failed)


def _show(sweep: Sweep) -> None:
    """Print the evaluations or profiles of a sweep side by side, and its summary. UserError if no job can be run."""
    from grpo_cli.report.tables import show_evaluations, show_profiles

    done = [(job.label, job.folder) for job, status in sweep.states.items() if status.state == "done"]
    if done and sweep.command != "train":
        (show_evaluations if sweep.command == "eval" else show_profiles)(done)
    typer.echo(sweep.summary())
    if sweep.counts()["skipped"] == len(sweep.states):
        reasons = dict.fromkeys(str(status.reason) for status in sweep.states.values())
        raise UserError("\n".join(["no combination can be run:", *reasons]))
