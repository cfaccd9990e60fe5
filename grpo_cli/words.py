"""The words of a command line: what those that cannot be used should have been, and how an unfinished one may go on.

Hydra is imported where it is needed only, so that help and completion answer at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any


def explained(error: Exception, command: str, arguments: Sequence[str]) -> str:
    """An error of the composition, in the words of the person who typed the arguments."""
    from hydra.errors import MissingConfigException, OverrideParseException

    from grpo_cli.typed import closest

    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file is not None:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        known = ", ".join(error.options)
        extras = "; more come with the extras joblib, submitit, ray and optuna" if group.startswith("hydra/") else ""
        return f"{group}={choice} is not one of the choices {known}{closest(choice, error.options)}{extras}"
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override} cannot be read: write key=value or group=choice, "
            "and quote for the shell what holds spaces, brackets or commas"
        )
    if isinstance(error, OSError) and error.filename is not None:
        key = "hydra.sweep.dir" if {"-m", "--multirun"} & set(arguments) else "hydra.run.dir"
        return f"cannot write {error.filename}: {error.strerror}; choose another folder with {key}=<folder>"
    unknown = re.match(r"Could not override '([^']+)'", str(error))
    if unknown:
        return f"{unknown[1]} is no setting{_elsewhere(unknown[1], command, arguments)}"
    return str(error).split("\n\n")[0].strip()


def unquoted(value: str) -> str:
    """A value as Hydra reads it if it is one quoted text: `'it\\'s'` is it's. Anything else stays as it is."""
    if not value.startswith(("'", '"')):
        return value
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return str(OverridesParser.create().parse_override(f"value={value}").value())
    except HydraException:
        return value


def _elsewhere(key: str, command: str, arguments: Sequence[str]) -> str:
    """Where a key is a setting: of other choices of its group, else one that is spelt nearly so."""
    from grpo_cli.config import choices, config_dir
    from grpo_cli.typed import closest

    group, _, word = key.partition(".")
    if word and (config_dir() / group).is_dir():
        files = {choice: config_dir() / group / f"{choice}.yaml" for choice in choices(group)}
        having = [f"{group}={choice}" for choice, file in files.items() if f"\n{word}:" in file.read_text("utf-8")]
        if having:
            return f" of this {group}; it is one of {', '.join(having)}"
    return closest(key, _known_keys(command, arguments))


def _known_keys(command: str, arguments: Sequence[str]) -> list[str]:
    """Every key of the configuration, with the groups that the arguments choose."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    from grpo_cli.config import config_dir

    groups = {folder.name for folder in config_dir().iterdir() if folder.is_dir()}
    chosen = [argument for argument in arguments if argument.split("=", 1)[0] in groups]
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        try:
            cfg = hydra.compose(command, chosen)
        except HydraException:  # a choice is wrong as well, or is one of a sweep's lists
            cfg = hydra.compose(command)
    return list(_keys(OmegaConf.to_container(cfg), ""))


def _keys(values: Any, prefix: str) -> Iterator[str]:
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")


def offered(command: str, words: Sequence[str], incomplete: str) -> list[str]:
    """How the word that is being typed may go on: `sam` to `sampler=full`, `sampler=in` to `sampler=infinite`.

    Bash cuts words at `=`, so that `incomplete` is what follows it, and `words` ends with the group (and `=`, once
    something follows). Where only one group is left its choices are offered, so that no shell ends the word at `=`.
    """
    from grpo_cli.config import choices

    groups = groups_of(command)
    before = [word for word in words if word != "="]
    if before and before[-1] in groups:
        return [choice for choice in choices(before[-1]) if choice.startswith(incomplete)]
    typed, equals, _ = incomplete.partition("=")
    begun = [group for group in groups if (group == typed if equals else group.startswith(typed))]
    if len(begun) == 1:
        return [word for choice in choices(begun[0]) if (word := f"{begun[0]}={choice}").startswith(incomplete)]
    return [f"{group}=" for group in begun]


def groups_of(command: str) -> list[str]:
    """The groups that a command's configuration chooses from."""
    from grpo_cli.config import config_dir

    file = "train" if command == "profile" else command  # a profile is of a training run
    text = (config_dir() / f"{file}.yaml").read_text(encoding="utf-8")
    return re.findall(r"^  - (\w+): \w+$", text, flags=re.MULTILINE)
