"""Reads the files of `conf/` and `experimental/conf/`: values, and the comments above them, which YAML parsers drop.

Help pages and `grpo explain` print them. Nothing is composed, and neither Hydra nor torch is imported.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_cli.support.errors import UserError

_own: list[Path] = []  # the folder of a user's own choices
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if compiled
_ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTAL = _ROOT / "grpo_cli" / "experimental" / "conf"
ENGINE_PARTS = ("engine", "sampler", "scheduler", "predictor", "sparsity")
_NO_SETTINGS = {"defaults", "hydra", "_target_", "_partial_"}


@dataclass(frozen=True)
class Setting:
    """A key of a file: its value as written there ("" for a group of settings), its comment, and its place."""

    value: str
    comment: str
    place: str  # conf/loss/grpo.yaml:7


@dataclass(frozen=True)
class ConfFile:
    """A file with what its bases add: the comment at its head, values, a choice of each group, settings by key."""

    about: str
    place: str
    values: Mapping[str, Any]
    choices: Mapping[str, str]
    settings: Mapping[str, Setting]


@functools.cache
def config_dir() -> Path:
    """Return `conf/`: inside the package in an installed wheel, beside it in a checkout."""
    return next(folder for folder in (_ROOT / "grpo_cli/conf", _ROOT / "conf") if (folder / "train.yaml").is_file())


def is_experimental(group: str, choice: str) -> bool:
    return (EXPERIMENTAL / group / f"{choice}.yaml").is_file()


def marked(group: str, choice: str) -> str:
    """Return a choice as it is listed, such as `x (experimental)`."""
    return f"{choice} (experimental)" if is_experimental(group, choice) else choice


def add_own(folder: Path | None) -> None:
    """Read choices from a folder of a user's own, too, and from none added before. UserError for a file with the name
    of one of ours, which Hydra would read in its place."""
    choices.cache_clear()
    _own[:] = [] if folder is None or folder.samefile(config_dir()) else [folder]
    for file in [file.relative_to(own) for own in _own for file in sorted(own.rglob("*.yaml"))]:
        if any((ours / file).is_file() for ours in (config_dir(), EXPERIMENTAL)):
            raise UserError(f"--config-dir={folder}: {file} has the name of one of ours, which is read: rename it")


@functools.cache
def choices(group: str) -> Sequence[str]:
    """Return the choices of a group: ours, experimental ones, a user's own. A file `_<name>` is a base of several."""
    folders = [folder / group for folder in (config_dir(), EXPERIMENTAL, *_own)]
    return [name for folder in folders for name in sorted(file.stem for file in folder.glob("[!_]*.yaml"))]


def read_choice(group: str, choice: str) -> ConfFile:
    files = [folder / group / f"{choice}.yaml" for folder in (EXPERIMENTAL, *_own, config_dir())]
    return read_conf(next(filter(Path.is_file, files), files[-1]))


def read_command(command: str) -> ConfFile:
    return read_conf(config_dir() / f"{command}.yaml")


def shipped(group: str, choice: str) -> dict[str, Any]:
    """Return a choice's keys and values, which the caller may change."""
    return copy.deepcopy(dict(read_choice(group, choice).values))


def groups_of(command: str) -> list[str]:
    """Return the groups that a command's configuration chooses from."""
    return [group for group in read_command(command).choices if not group.startswith("hydra/")]


def chosen(command: str, typed: Mapping[str, str]) -> dict[str, str]:
    """Return the choice of each group of a command beside these typed words, by key; those of an experiment, too."""
    named = typed.get("experiment", "")
    recipe = read_choice("experiment", named).choices if named in choices("experiment") else {}
    return {group: {**read_command(command).choices, **recipe, **typed}[group] for group in groups_of(command)}


def prefix_of(group: str) -> str:
    """Return what stands before the settings of a group's choices, as they are typed."""
    return "" if group == "experiment" else f"{group.replace('/', '.')}."


def parts_of(command: str) -> tuple[str, ...]:
    """Return its groups that are built from a `_target_`: all but the model and named experiments."""
    return tuple(group for group in groups_of(command) if group not in ("model", "experiment"))


def choice_of(group: str, part: Mapping[str, Any]) -> str:
    """Return the choice that needs the fewest other settings to give this part; for a user's own part its target."""
    files = {choice: read_choice(group, choice).values for choice in choices(group)}
    same = [choice for choice, values in files.items() if values.get("_target_") == part["_target_"]]
    shared = {choice: sum(part.get(key) == value for key, value in files[choice].items()) for choice in same}
    return max(shared, key=shared.__getitem__, default=str(part["_target_"]))


@functools.cache
def read_conf(file: Path) -> ConfFile:
    """Read a file and its bases. A key without a comment inherits the base's, or else that of the key above."""
    text = file.read_text(encoding="utf-8")
    try:
        lines, own = text.splitlines(), yaml.load(text, _LOADER) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    values, groups, settings = dict[str, Any](), dict[str, str](), dict[str, Setting]()
    for entry in own.pop("defaults", []):
        if isinstance(entry, dict):
            groups |= {group.removeprefix("override ").lstrip("/"): choice for group, choice in entry.items()}
        elif entry != "_self_":  # a base, beside the file or in its group of `conf/`
            beside = file.parent / f"{entry}.yaml"
            base = read_conf(beside if beside.is_file() else config_dir() / file.parent.name / beside.name)
            values, groups = _merged(values, base.values), {**base.choices, **groups}
            settings = {**settings, **base.settings}
    place = file.relative_to(_ROOT) if file.is_relative_to(_ROOT) else file.name
    head = next((row for row, line in enumerate(lines) if not line.startswith("#")), len(lines))

    def read_settings(node: Any, prefix: str = "") -> None:
        above = ""
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name, row = prefix + key.value, key.start_mark.line
            if name in _NO_SETTINGS:
                continue
            is_group = isinstance(value, yaml.MappingNode) and not value.flow_style
            written = "" if is_group else text[value.start_mark.index : value.end_mark.index]
            inherited = settings[name].comment if name in settings else ""
            comment = _comment_above(lines[head:row]) or inherited or ("" if is_group else above)
            above = "" if is_group else comment
            settings[name] = Setting(written, comment, f"{place}:{row + 1}")
            if is_group:
                read_settings(value, f"{name}.")

    read_settings(yaml.compose(text, _LOADER))
    return ConfFile(_comment_above(lines[:head]), str(place), _merged(values, own), groups, settings)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings key by key, as Hydra does."""
    both = {k: _merged(below[k], v) for k, v in above.items() if isinstance(v, dict) and isinstance(below.get(k), dict)}
    return {**below, **above, **both}


def _comment_above(lines: Sequence[str]) -> str:
    """Return the comment that these lines end with, on one line."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), (line.strip() for line in reversed(lines)))
    words = [line.removeprefix("#").strip() for line in comment]
    return " ".join(line for line in reversed(words) if not line.startswith("@package"))
