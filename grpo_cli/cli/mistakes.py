"""Messages about unusable command lines: what was typed, and what it should have been.

Hydra is imported lazily, so that help is immediate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import typer

from grpo_cli.support.errors import UserError, closest
from grpo_cli.support.extras import EXTRAS, absent, installed
from grpo_cli.support.formatting import legible


@contextmanager
def refusals() -> Iterator[None]:
    """Ends the program with a UserError's message."""
    try:
        yield
    except UserError as error:
        fail(error)


def named(text: str | Path) -> Path:
    """A folder as typed. An empty word is refused: it would mean the current directory."""
    if not str(text).strip():
        raise typer.BadParameter("it is empty: name a folder (. is the current directory)")
    return Path(text)


def unusable(command: str, flags: Sequence[str], overrides: Sequence[str]) -> Iterator[str]:
    """Problems that Hydra would answer with a traceback, or misunderstand."""
    from grpo_cli.config.choices import choices, config_dir, groups_of, marked
    from grpo_cli.config.removed import removed

    yield from (sentence for _, sentence in removed(overrides))
    for word in overrides:
        group, _, choice = word.lstrip("+").partition("=")
        if group in groups_of(command) and not word.startswith("~") and choice in ("null", "true", "false", ""):
            yield f"{word} is none of the choices of {group}: {', '.join(marked(group, one) for one in choices(group))}"
        if group in groups_of("eval") and group not in groups_of(command):
            yield f"{word} is for grpo eval alone: leave it out"
        if group == "hydra.sweeper.max_batch_size" and not (choice == "null" or choice.isdecimal() and int(choice)):
            yield f"{word} must be a whole number of at least 1, or null"
    if "--resolve" in flags and not {"--cfg", "-c", "--help"} & {flag.partition("=")[0] for flag in flags}:
        yield "--resolve says how settings are printed: add --cfg job"
    names = [flags[i + 1] for i, flag in enumerate(flags[:-1]) if flag in ("--config-name", "-cn")]
    for name in [*names, *(flag.partition("=")[2] for flag in flags if flag.startswith("--config-name="))]:
        if name != command and (config_dir() / f"{name.removesuffix('.yaml')}.yaml").is_file():
            yield f"--config-name={name} is not what grpo {command} reads: leave it out, or type grpo {name} ..."


def fail(error: UserError | str) -> NoReturn:
    """End the program as for every mistake: one message and exit code 2."""
    typer.echo(f"error: {legible(str(error))}", err=True)
    raise typer.Exit(2)


def explained(error: Exception, command: str, arguments: Sequence[str]) -> str:
    """The message for an error while Hydra composes the configuration."""
    from hydra.errors import MissingConfigException, OverrideParseException

    problems = _problems(command, arguments)
    if len(problems) > 1:
        return "\n".join([f"{len(problems)} settings cannot be used:", *(f"  - {line}" for line in problems)])
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file is not None:
        *groups, choice = error.missing_cfg_file.split("/", 2 if error.missing_cfg_file.startswith("hydra/") else 1)
        group = "/".join(groups)
        lost = _of_the_resumed_run(f"{group}={choice}", arguments)
        return _no_choice(group, choice, [option for option in error.options if not option.startswith("_")]) + lost
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override} cannot be read: write key=value or group=choice, "
            "and quote for the shell what holds spaces, brackets or commas"
        )
    if isinstance(error, OSError):
        key = "hydra.sweep.dir" if {"-m", "--multirun"} & set(arguments) else "hydra.run.dir"
        where = error.filename or "the run's folder"  # a full disk names no file
        return f"cannot write {where}: {error.strerror or error}; choose another folder with {key}=<folder>"
    unknown = re.match(r"Could not override '([^']+)'", str(error))
    if unknown:
        return _no_setting(unknown[1], _known_keys(command, arguments))
    return str(error).split("\n\n")[0].strip()


def _of_the_resumed_run(word: str, arguments: Sequence[str]) -> str:
    """What to do if the resumed run was started with a choice that no longer exists."""
    from grpo_cli.config.overrides import value_of
    from grpo_cli.runs.record import read_record

    run = value_of("hydra.run.dir", [found for found in arguments if found.startswith("++")])
    record = read_record(Path(run)) if run else None
    if record is None or word not in record.overrides:
        return ""
    return (
        f"; the run in {run} was started with it, and this version has no such choice: start a new run from "
        "its weights with model.path=<checkpoint> and another choice"
    )


def _problems(command: str, arguments: Sequence[str]) -> list[str]:
    """Every unknown key and every unknown choice: Hydra names only the first."""
    from grpo_cli.config.choices import choices, config_dir

    given = [word.partition("=") for word in arguments if "=" in word and not word.startswith(("-", "+", "~", "="))]
    groups = {folder.name for folder in config_dir().iterdir() if folder.is_dir()}
    known, problems = _known_keys(command, arguments), []
    for key, _, value in given:
        if key in groups & set(known):
            wrong = re.fullmatch(r"\w+", value) and value not in (*choices(key), "null") and not _own(arguments)
            problems += [_no_choice(key, value, choices(key))] if wrong else []
        elif key not in known and not key.startswith(("hydra.", "hydra/")) and "@" not in key:
            problems.append(_no_setting(key, known))
    return problems


def _own(arguments: Sequence[str]) -> bool:
    """Whether the user's own config folder may add choices."""
    return any(word.startswith(("--config-dir", "-cd", "hydra.searchpath")) for word in arguments)


def _no_choice(group: str, choice: str, options: Sequence[str]) -> str:
    from grpo_cli.config.choices import is_experimental, marked

    for module in EXTRAS:
        if module.startswith(f"hydra_plugins.hydra_{choice.partition('_')[0]}_") and not installed(module):
            return absent(module, f"{group}={choice}")
    extras = "; more come with the extras joblib, submitit, ray and optuna" if group.startswith("hydra/") else ""
    show, options = partial(marked, group), sorted(options, key=partial(is_experimental, group))
    hint = _as_a_path(group, choice, options) or closest(choice, options, show)
    return f"{group}={choice} is not one of the choices {', '.join(map(show, options))}{hint}{extras}"


def _as_a_path(group: str, choice: str, options: Sequence[str]) -> str:
    """What to type where a file or folder was named in place of a choice."""
    from grpo_cli.config.choices import shipped

    if not re.search(r"[/.\\]", choice):
        return ""
    parts = {option: shipped(group, option) for option in options}
    open_to_any = [
        name for name, of in parts.items() if of.get("path", "") in (None, "???") and not of.get("default_path")
    ]
    return f"; a path is given as {group}={open_to_any[0]} {group}.path={choice}" if open_to_any else ""


def _no_setting(key: str, known: Sequence[str]) -> str:
    return f"{key} is no setting{_elsewhere(key, known)}"


def _elsewhere(key: str, known: Sequence[str]) -> str:
    """What the key may have meant: a setting of another choice of its group, a name of TRL or verl, a misspelling."""
    from grpo_cli.config.choices import choices, shipped
    from grpo_cli.config.elsewhere import meant_by

    group, _, word = key.partition(".")
    having = [choice for choice in choices(group) if group and word in _keys(shipped(group, choice), "")]
    if having:
        return f" of this {group}; it is one of {', '.join(f'{group}={choice}' for choice in having)}"
    row = meant_by(key)
    return f"; did you mean {row.ours}?" if row is not None else closest(key, known)


def _known_keys(command: str, arguments: Sequence[str]) -> list[str]:
    """Every key of the configuration, with the groups that the arguments choose."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    from grpo_cli.config.choices import config_dir

    groups = {folder.name for folder in config_dir().iterdir() if folder.is_dir()}
    chosen = [argument for argument in arguments if argument.split("=", 1)[0] in groups]
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        try:
            cfg = hydra.compose(command, chosen)
        except HydraException:  # a choice is wrong too, or is a sweep's list
            cfg = hydra.compose(command)
    return list(_keys(OmegaConf.to_container(cfg), ""))


def _keys(values: Any, prefix: str) -> Iterator[str]:
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
