"""Reads the files of `conf/` and `experimental/conf/`: values, and the comments above them, which YAML parsers drop.

They are the one place of defaults and of their documentation: help pages and `grpo explain` print them. Nothing is
composed, and neither Hydra nor torch is imported.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if compiled
EXPERIMENTAL = Path(__file__).resolve().parent.parent / "experimental" / "conf"
ENGINE_PARTS = ("engine", "sampler", "scheduler", "predictor", "sparsity")
_NO_SETTINGS = {"defaults", "hydra", "_target_", "_partial_"}


@dataclass(frozen=True)
class Setting:
    """A key of a file: its value in YAML ("" for a group of settings), its comment, and its place."""

    value: str
    comment: str
    place: str  # conf/loss/grpo.yaml:7


@dataclass(frozen=True)
class ConfFile:
    """A file with what its base files add: `about` is the comment at its head, `choices` are its defaults in each
    group, `settings` are in order by key (`lora.rank`)."""

    about: str
    place: str
    values: Mapping[str, Any]
    choices: Mapping[str, str]
    settings: Mapping[str, Setting]


@functools.cache
def config_dir() -> Path:
    """Return `conf/`: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    folders = (package / "conf", package.parent / "conf")
    return next(folder for folder in folders if (folder / "train.yaml").is_file())


def is_experimental(group: str, choice: str) -> bool:
    return (EXPERIMENTAL / group / f"{choice}.yaml").is_file()


def marked(group: str, choice: str) -> str:
    """Return a choice as it is listed, such as `x (experimental)`."""
    return f"{choice} (experimental)" if is_experimental(group, choice) else choice


@functools.cache
def choices(group: str) -> Sequence[str]:
    """Return the choices of a group, experimental ones last. A file whose name begins with `_` is a base of several."""
    folders = (config_dir() / group, EXPERIMENTAL / group)
    return [name for folder in folders for name in sorted(file.stem for file in folder.glob("[!_]*.yaml"))]


def read_choice(group: str, choice: str) -> ConfFile:
    return read_conf((EXPERIMENTAL if is_experimental(group, choice) else config_dir()) / group / f"{choice}.yaml")


def read_command(command: str) -> ConfFile:
    return read_conf(config_dir() / f"{command}.yaml")


def shipped(group: str, choice: str) -> dict[str, Any]:
    """Return a choice's keys and values, which the caller may change."""
    return copy.deepcopy(dict(read_choice(group, choice).values))


def groups_of(command: str) -> list[str]:
    """Return the groups that a command's configuration chooses from."""
    return [group for group in read_command(command).choices if not group.startswith("hydra/")]


def parts_of(command: str) -> tuple[str, ...]:
    """Return its groups that are built from a `_target_`: all but the model and named experiments."""
    return tuple(group for group in groups_of(command) if group not in ("model", "experiment"))


def choice_of(group: str, part: Mapping[str, Any]) -> str:
    """Return the choice that needs the fewest other settings to give this part; for a user's own part its target."""
    files = {choice: read_choice(group, choice).values for choice in choices(group)}
    same = [choice for choice, values in files.items() if values.get("_target_") == part["_target_"]]
    alike = {choice: sum(part.get(key) == value for key, value in files[choice].items()) for choice in same}
    return max(alike, key=alike.__getitem__, default=str(part["_target_"]))


@functools.cache
def read_conf(file: Path) -> ConfFile:
    """Read a file and its bases. A key without a comment inherits the base's, or else that of the key above."""
    text = file.read_text(encoding="utf-8")
    lines, own = text.splitlines(), yaml.load(text, _LOADER) or {}
    values, groups, settings = dict[str, Any](), dict[str, str](), dict[str, Setting]()
    for entry in own.pop("defaults", []):
        if isinstance(entry, dict):
            groups |= {group.removeprefix("override ").lstrip("/"): choice for group, choice in entry.items()}
        elif entry != "_self_":  # a base, beside the file or in its group of `conf/`
            beside = file.parent / f"{entry}.yaml"
            base = read_conf(beside if beside.is_file() else config_dir() / file.parent.name / beside.name)
            values, groups = _over(values, base.values), {**base.choices, **groups}
            settings = {**settings, **base.settings}
    head = next((row for row, line in enumerate(lines) if not line.startswith("#")), len(lines))
    place = file.name
    for folder, name in ((EXPERIMENTAL, "grpo_cli/experimental/conf"), (config_dir(), "conf")):
        place = f"{name}/{file.relative_to(folder)}" if file.is_relative_to(folder) else place
    above: dict[str, str] = {}
    for key, setting in _settings(yaml.compose(text, _LOADER), [""] * head + lines[head:], place):
        group = key.rpartition(".")[0]
        shared = above.get(group, "") if setting.value else ""
        comment = setting.comment or (settings[key].comment if key in settings else shared)
        above[group] = comment if setting.value else ""
        settings[key] = replace(setting, comment=comment)
    return ConfFile(_comment_above(lines, head), place, _over(values, own), groups, settings)


def flow(value: Any) -> str:
    """Return a value on one line, as typed after `key=`."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings key by key, as Hydra does."""
    both = {k: _over(below[k], v) for k, v in above.items() if isinstance(v, dict) and isinstance(below.get(k), dict)}
    return {**below, **above, **both}


def _settings(node: Any, lines: Sequence[str], file: str, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value in _NO_SETTINGS and not prefix:
            continue
        row, below = key.start_mark.line, isinstance(value, yaml.MappingNode) and not value.flow_style
        text = "" if below else flow(yaml.constructor.SafeConstructor().construct_document(value))
        yield prefix + key.value, Setting(text, _comment_above(lines, row), f"{file}:{row + 1}")
        if below:
            yield from _settings(value, lines, file, f"{prefix}{key.value}.")


def _comment_above(lines: Sequence[str], row: int) -> str:
    """Return the comment directly above a row, on one line."""
    first = row
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    words = (line.strip().removeprefix("#").strip() for line in lines[first:row])
    return " ".join(line for line in words if not line.startswith("@package"))
