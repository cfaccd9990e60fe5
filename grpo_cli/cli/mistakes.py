"""Messages about unusable command lines: what was typed, and what it should have been.

Hydra is imported lazily, so that help is immediate.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import typer

from grpo_cli.support.errors import UserError, closest
from grpo_cli.support.extras import EXTRAS, absent, installed
from grpo_cli.support.formatting import legible

FLAGS_WITH_VALUE = {
    *("--cfg", "-c", "--package", "-p", "--info", "-i", "--config-path", "-cp", "--config-name", "-cn"),
    *("--config-dir", "-cd", "--experimental-rerun"),
}
_FLAGS = FLAGS_WITH_VALUE | {
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc"),
}
_QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")


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
    for place, flag in enumerate(flags):
        value = flags[place + 1] if flags[place + 1 : place + 2] and not flags[place + 1].startswith("-") else None
        if flag.startswith("-") and flag.partition("=")[0] not in _FLAGS:
            yield _without_dashes(command, flag, value)
        elif flag in FLAGS_WITH_VALUE - {"--info", "-i"} and value is None:
            yield f"{flag} lacks its value"
    for word in overrides:
        group, _, choice = word.lstrip("+").partition("=")
        yield from _misread_numbers(group, choice)
        if group in groups_of(command) and not word.startswith("~") and choice in ("null", "true", "false", ""):
            yield f"{word} is none of the choices of {group}: {', '.join(marked(group, one) for one in choices(group))}"
        if group in groups_of("eval") and group not in groups_of(command):
            yield f"{word} is for grpo eval alone: leave it out"
        if group == "hydra.sweeper.max_batch_size" and not (choice == "null" or choice.isdecimal() and int(choice)):
            yield f"{word} must be a whole number of at least 1, or null"
        if group == "hydra.job.chdir" and choice.lower() == "true":
            yield f"{word} would turn every relative path into one in the run's folder: leave it out"
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
        return f"{error.override} cannot be read: {_as_text(str(error.override)) or 'write key=value or group=choice'}"
    sweep = re.match(
        r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'(?:\n| requires)", str(error), re.DOTALL
    )
    if sweep:
        key, _, value = sweep[1].partition("=")
        a_list = f"a list is typed {shlex.quote(f'{key}=[{value}]')}; " if "(" not in value else ""
        return f"{sweep[1]} is a sweep: add -m; {a_list}{_as_text(sweep[1])}"
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


def _without_dashes(command: str, flag: str, value: str | None) -> str:
    """The answer to a setting that is typed as a flag."""
    key, equals, inside = flag.lstrip("-").replace("-", "_").partition("=")
    from grpo_cli.config.elsewhere import meant_by

    if any(one.startswith(flag) for one in _FLAGS) and len(flag) > 3:
        return f"{flag} is no flag{closest(flag, _FLAGS)}"
    known, row = _known_keys(command, ()), meant_by(key)
    below = [name for name in known if name.endswith(f".{key}")]
    ours = key if key in known else row.ours if row is not None else below[0] if len(below) == 1 else key
    name = ours.partition("=")[0]
    if name not in known and name != "hydra.run.dir":
        return f"{flag} is no flag, and {_no_setting(key, known)}; settings are written without dashes, as n=32"
    said = inside if equals else value
    typed = f": {shlex.quote(f'{name}={said}')}" if said else f": {ours}" if "=" in ours else f": grpo explain {name}"
    return f"{flag} is no flag; settings are written without dashes{typed}"


def _misread_numbers(key: str, value: str) -> Iterator[str]:
    """Numbers that Hydra cannot read, or reads as others than they seem to be."""
    for word in re.split(r"[\s,:()\[\]{}]+", _QUOTED.sub(" ", value)):
        if re.search(r"\d{1000}", word):
            yield f"{key} has a number of {len(word)} digits: give a shorter one"
        elif "_" in word and re.fullmatch(r"[+-]?\d[\d_]*(\.[\d_]*)?(e[+-]?[\d_]+)?", word, re.IGNORECASE):
            yield f"{key}={value}: write {word.replace('_', '')} for {word}; {_as_text(f'{key}={value}')}"


def _as_text(word: str) -> str:
    """How to type an override whose value is text; nothing if it cannot be typed."""
    from grpo_cli.config.overrides import quoted, unquoted

    key, equals, value = word.partition("=")
    text = quoted(value, '"').replace("\\${", "${")
    if not re.fullmatch(r"[+]{0,2}[\w.@/-]+", key) or not equals or unquoted(text) != value or len(word) > 500:
        return ""
    return f"as text it is typed {shlex.quote(f'{key}={text}')}"


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
