"""Messages about unusable command lines: what was typed, and what it should have been. Imports no Hydra at the top."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import typer

from grpo_cli.config.choices import choices, config_dir, defaults_of, groups_of, marked
from grpo_cli.config.comments import read_choice, read_conf
from grpo_cli.config.elsewhere import meant_by, removed
from grpo_cli.config.overrides import quoted, value_of
from grpo_cli.support.errors import UserError, closest, refuse
from grpo_cli.support.extras import EXTRAS, absent, installed
from grpo_cli.support.formatting import legible

NUMBER = r"[+-]?\d[\d_]*(\.[\d_]*)?(e[+-]?[\d_]+)?"  # as Python and Hydra read them


def fail(error: UserError | str) -> NoReturn:
    """End the program as for every mistake: one message and exit code 2."""
    typer.echo(f"error: {legible(str(error))}", err=True)
    raise typer.Exit(2)


def folder(text: str | Path) -> Path:
    """Return a folder as typed. An empty word is refused: it would mean the current directory."""
    if not str(text).strip():
        raise typer.BadParameter("it is empty: name a folder (. is the current directory)")
    return Path(text)


def unusable(command: str, words: Sequence[str], is_sweep: bool) -> Iterator[str]:
    """Yield problems that Hydra would answer with a traceback, or misunderstand."""
    yield from removed(words)
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if not re.match(r"~?[^~=]", key) or not (equals or key.startswith("~")):
            yield f"{word} cannot be read: write key=value or group=choice"
        elif re.search(r"\d{1000}", value):
            yield f"{key} has a number of more than 1000 digits: give a shorter one"
        elif any("_" in one and re.fullmatch(NUMBER, one, re.I) for one in re.split(r"[\s,\[\](){}:]+", value)):
            yield f"{word} has a number with underscores: leave them out, or quote it as text"
        elif key in groups_of(command) and value in ("null", "true", "false", ""):
            yield no_choice(key, value, choices(key))
        elif word == "resume=sweep" and not is_sweep:
            yield f"{word} continues a sweep: add -m, or name the folder of one run"
        elif key == "resume" and value not in ("null", "sweep") and is_sweep:
            yield f"{word} continues one run: leave out -m, and name the folder of a sweep's job"
        elif key == "hydra.job.chdir" and value.lower() not in ("false", "null"):
            yield f"{word}: a run stays in the folder where it is started, to which its paths refer; leave it out"
        elif key == "hydra.sweeper.max_batch_size" and not re.fullmatch("null|0*[1-9][0-9]*", value):
            yield f"{word} must be a whole number of at least 1, or null"


@contextmanager
def explained(command: str, words: Sequence[str], composing: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Turn an error of Hydra into a UserError: every unknown key and choice, or else what Hydra found. Once it is no
    longer `composing`, an error is a bug, and keeps its traceback."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException, OSError) as error:
        if not composing():
            raise
        refuse([*_unknown(command, words)])
        refers = [f"{word}: " for word in words if "${" in word and isinstance(error, OmegaConfBaseException)]
        raise UserError("".join(refers[:1]) + _explanation(error)) from error


def _explanation(error: Any) -> str:
    """Return what Hydra found, in one sentence."""
    from hydra.errors import MissingConfigException, OverrideParseException

    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file is not None:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return no_choice(group, choice, [option for option in error.options if not option.startswith("_")])
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read: {_as_text(str(error.override)) or 'write key=value or group=choice'}"
    if sweep := re.match(
        r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'(?:\n| requires)", str(error), re.S
    ):
        key, _, value = sweep[1].partition("=")
        return f"{sweep[1]} is a sweep: add -m; a list is typed {shlex.quote(f'{key}=[{value}]')}, {_as_text(sweep[1])}"
    if isinstance(error, OSError):
        where = error.filename or "the sweep's folder"  # a full disk names no file
        return f"cannot write {where}: {error.strerror or error}; choose another folder with hydra.sweep.dir=<folder>"
    return str(error).split("\n\n")[0].strip()


def _as_text(word: str) -> str:
    """Return how a word whose value is text is typed; empty if it is no setting."""
    key, equals, value = word.partition("=")
    text = quoted(value, '"').replace("\\${", "${")
    known = equals and re.fullmatch(r"[+]{0,2}[\w.@/-]+", key) and len(word) <= 500
    return f"as text it is typed {shlex.quote(f'{key}={text}')}" if known else ""


def _unknown(command: str, words: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with each key and choice that is not known."""
    groups = groups_of(command)
    has_own = any(word.startswith("hydra.searchpath") for word in words)
    known = known_keys(command, words)
    for word in (word for word in words if re.match(r"[^-+~=][^=]*=", word)):
        key, _, value = word.partition("=")
        if key in groups:
            if re.fullmatch(r"[\w./\\-]+", value) and value not in (*choices(key), "null") and not has_own:
                yield no_choice(key, value, choices(key))
        elif key not in known and not key.startswith(("hydra.", "hydra/")) and "@" not in key:
            yield no_setting(key, known)


def without_dashes(command: str, flag: str, words: Sequence[str]) -> str:
    """Return the answer to a setting that is typed as an option, whose value may be the next of the command's words."""
    key = flag.lstrip("-").replace("-", "_")
    known = known_keys(command, ())
    below = [name for name in known if name.endswith(f".{key}")]
    meant = key if key in known else meant_by(key) or (below[0] if len(below) == 1 else None)
    if meant is None:
        return f"{flag} is no option, and {no_setting(key, known)}; settings are typed without dashes: n=32"
    after = next((words[place + 1 :] for place, word in enumerate(words) if word == flag), [])
    inside = next((word.partition("=")[2] for word in words if word.startswith(f"{flag}=")), "")
    value = inside or next((word for word in after[:1] if "=" not in word and not word.startswith("-")), "...")
    typed = meant if "=" in meant else shlex.quote(f"{meant}={value}")
    return f"{flag} is no option; settings are typed without dashes: {typed}"


def no_choice(group: str, choice: str, options: Sequence[str]) -> str:
    """Return that a group has no such choice, with those that it has."""
    for module in EXTRAS:
        if module.startswith(f"hydra_plugins.hydra_{choice.partition('_')[0]}_") and not installed(module):
            return absent(module, f"{group}={choice}")
    show = partial(marked, group)
    is_a_path = group in ("model", "task") and re.search(r"[/.\\]", choice)
    example = {"model": "hf", "task": "jsonl"}.get(group)
    path = f"; a path is given as {group}={example} {group}.path={choice}"
    hint = path if is_a_path else closest(choice, options, show)
    return f"{group}={choice} is not one of the choices {', '.join(map(show, options))}{hint}"


def no_setting(key: str, known: Mapping[str, str]) -> str:
    """Return what an unknown key may have meant: a setting of another choice of its group, a name of TRL or verl, a
    misspelling."""
    group, _, word = key.partition(".")
    having = [f"{group}={one}" for one in choices(group) if group and word in read_choice(group, one).settings]
    if having:
        return f"{key} is no setting of this {group}; it is one of {', '.join(having)}"
    if known.get(key.rpartition(".")[0]) == "{}":  # it takes any key
        return f"{key} is new to {group}: type +{key}=..."
    ours, near = meant_by(key), [one for one in known if "." not in key or "." in one]
    return f"{key} is no setting{f'; did you mean {ours}?' if ours else closest(key, near)}"


def known_keys(command: str, words: Sequence[str]) -> dict[str, str]:
    """Return every key of the configuration with the choices among these words, and its value in `conf/`."""
    known = {key: one.value for key, one in read_conf(config_dir() / f"{command}.yaml").settings.items()}
    for group, default in defaults_of(command).items():
        typed = value_of(group, words)
        choice = typed if typed in choices(group) else default
        if "/" not in group:
            known[group] = choice
            known |= {f"{group}.{key}": one.value for key, one in read_choice(group, choice).settings.items()}
    return known
