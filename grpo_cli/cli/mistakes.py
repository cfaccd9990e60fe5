"""Messages about unusable command lines: what was typed, and what it should have been.

Hydra is imported in functions, so that help is immediate.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import typer

from grpo_cli.support.errors import UserError, closest, refuse
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


@contextmanager
def refusals() -> Iterator[None]:
    """End the program with a UserError's message."""
    try:
        yield
    except UserError as error:
        fail(error)


def fail(error: UserError | str) -> NoReturn:
    """End the program as for every mistake: one message and exit code 2."""
    typer.echo(f"error: {legible(str(error))}", err=True)
    raise typer.Exit(2)


def named(text: str | Path) -> Path:
    """Return a folder as typed. An empty word is refused: it would mean the current directory."""
    if not str(text).strip():
        raise typer.BadParameter("it is empty: name a folder (. is the current directory)")
    return Path(text)


def unusable(command: str, flags: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """Yield problems that Hydra would answer with a traceback, or misunderstand."""
    from grpo_cli.config.choices import choices, config_dir, groups_of
    from grpo_cli.config.removed import removed

    yield from (sentence for _, sentence in removed(words))
    for flag, value in pairwise([*flags, "-"]):
        if flag.startswith("-") and flag.partition("=")[0] not in _FLAGS:
            yield _without_dashes(command, flag, "" if value.startswith("-") else value)
        elif flag in FLAGS_WITH_VALUE - {"--info", "-i"} and value.startswith("-"):
            yield f"{flag} lacks its value"
        elif flag.partition("=")[0] in ("--config-name", "-cn"):
            name = (flag.partition("=")[2] or value).removesuffix(".yaml")
            if name != command and (config_dir() / f"{name}.yaml").is_file():
                yield f"--config-name {name} is not what grpo {command} reads: type grpo {name} ..."
    if "--resolve" in flags and not {"--cfg", "-c", "--help"} & {flag.partition("=")[0] for flag in flags}:
        yield "--resolve says how settings are printed: add --cfg job"
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if re.search(r"\d{1000}", value):
            yield f"{key} has a number of more than 1000 digits: give a shorter one"
        elif key in groups_of(command) and value in ("null", "true", "false", ""):
            yield no_choice(key, value, choices(key))
        elif key in groups_of("eval") and key not in groups_of(command):
            yield f"{word} is for grpo eval alone: leave it out"
        elif key == "hydra.sweeper.max_batch_size" and not re.fullmatch("null|0*[1-9][0-9]*", value):
            yield f"{word} must be a whole number of at least 1, or null"
        elif key == "hydra.job.chdir" and value.lower() == "true":
            yield f"{word} would turn every relative path into one in the run's folder: leave it out"


def explained(error: Exception, command: str, words: Sequence[str]) -> str:
    """Return the message for an error while Hydra composes the configuration: every unknown key and choice, or else
    what Hydra found."""
    from hydra.errors import MissingConfigException, OverrideParseException

    try:
        refuse([*_unknown(command, words)])
    except UserError as unknown:
        return str(unknown)
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file is not None:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return no_choice(group, choice, [option for option in error.options if not option.startswith("_")])
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read: {_as_text(str(error.override)) or 'write key=value or group=choice'}"
    ambiguous = r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'(?:\n| requires)"
    if sweep := re.match(ambiguous, str(error), re.S):
        key, _, value = sweep[1].partition("=")
        a_list = f"a list is typed {shlex.quote(f'{key}=[{value}]')}; " if "(" not in value else ""
        return f"{sweep[1]} is a sweep: add -m; {a_list}{_as_text(sweep[1])}"
    if isinstance(error, OSError):
        key = "hydra.sweep.dir" if {"-m", "--multirun"} & set(words) else "hydra.run.dir"
        where = error.filename or "the run's folder"  # a full disk names no file
        return f"cannot write {where}: {error.strerror or error}; choose another folder with {key}=<folder>"
    return str(error).split("\n\n")[0].strip()


def _unknown(command: str, words: Sequence[str]) -> Iterator[str]:
    from grpo_cli.config.choices import choices, config_dir

    groups = {folder.name for folder in config_dir().iterdir() if folder.is_dir()}
    has_own = any(word.startswith(("--config-dir", "-cd", "hydra.searchpath")) for word in words)
    known = _known_keys(command, [word for word in words if word.partition("=")[0] in groups])
    for word in (word for word in words if re.match(r"[^-+~=][^=]*=", word)):
        key, _, value = word.partition("=")
        if key in groups & set(known):
            if re.fullmatch(r"[\w./\\-]+", value) and value not in (*choices(key), "null") and not has_own:
                yield no_choice(key, value, choices(key))
        elif key not in known and not key.startswith(("hydra.", "hydra/")) and "@" not in key:
            yield _no_setting(key, known)


def _without_dashes(command: str, flag: str, value: str) -> str:
    """Return the answer to a setting that is typed as a flag."""
    from grpo_cli.config.elsewhere import meant_by

    if any(one.startswith(flag) for one in _FLAGS) and len(flag) > 3:
        return f"{flag} is no flag{closest(flag, _FLAGS)}"
    key, _, inside = flag.lstrip("-").replace("-", "_").partition("=")
    known, ours = _known_keys(command, ()), meant_by(key)
    below = [name for name in known if name.endswith(f".{key}")]
    meant = key if key in known else ours or (below[0] if len(below) == 1 else key)
    name, _, example = meant.partition("=")
    if name not in known and name != "hydra.run.dir":
        return f"{flag} is no flag, and {_no_setting(key, known)}; settings are written without dashes, as n=32"
    typed = inside or example or value
    how = shlex.quote(f"{name}={typed}") if typed else f"{name}=..."
    return f"{flag} is no flag; settings are written without dashes: {how}"


def _as_text(word: str) -> str:
    """Return how to type an override whose value is text; nothing if it cannot be typed."""
    from grpo_cli.config.overrides import quoted, unquoted

    key, equals, value = word.partition("=")
    text = quoted(value, '"').replace("\\${", "${")
    if not re.fullmatch(r"[+]{0,2}[\w.@/-]+", key) or not equals or unquoted(text) != value or len(word) > 500:
        return ""
    return f"as text it is typed {shlex.quote(f'{key}={text}')}"


def no_choice(group: str, choice: str, options: Sequence[str]) -> str:
    """Return that a group has no such choice, with those that it has."""
    from grpo_cli.config.choices import marked, shipped

    for module in EXTRAS:
        if module.startswith(f"hydra_plugins.hydra_{choice.partition('_')[0]}_") and not installed(module):
            return absent(module, f"{group}={choice}")
    show = partial(marked, group)
    hint = closest(choice, options, show)
    for option in options if re.search(r"[/.\\]", choice) else ():
        part = shipped(group, option)
        if part.get("path", "") in (None, "???") and not part.get("default_path"):
            hint = f"; a path is given as {group}={option} {group}.path={choice}"
            break
    return f"{group}={choice} is not one of the choices {', '.join(map(show, options))}{hint}"


def _no_setting(key: str, known: Sequence[str]) -> str:
    """Return what an unknown key may have meant: a setting of another choice of its group, a name of TRL or verl, a
    misspelling."""
    from grpo_cli.config.choices import choices, shipped
    from grpo_cli.config.elsewhere import meant_by

    group, _, word = key.partition(".")
    having = [f"{group}={one}" for one in choices(group) if group and word in _keys(shipped(group, one), "")]
    if having:
        return f"{key} is no setting of this {group}; it is one of {', '.join(having)}"
    ours = meant_by(key)
    return f"{key} is no setting{f'; did you mean {ours}?' if ours else closest(key, known)}"


def _known_keys(command: str, chosen: Sequence[str]) -> list[str]:
    """Return every key of the configuration with these choices."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    from grpo_cli.config.choices import config_dir

    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        try:
            cfg = hydra.compose(command, list(chosen))
        except HydraException:  # a choice is wrong too, or is a sweep's list
            cfg = hydra.compose(command)
    return list(_keys(OmegaConf.to_container(cfg), ""))


def _keys(values: Any, prefix: str) -> Iterator[str]:
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
