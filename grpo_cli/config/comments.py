"""Reads the comments of `conf/`: above each key and at the head of each file, which YAML parsers drop.

They are the one place where settings are explained; help pages and `grpo explain` print them. Values are those in the
files; nothing is composed, and neither Hydra nor torch is imported.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from grpo_cli.config.choices import EXPERIMENTAL, bases_of, conf_file, config_dir

_NO_SETTINGS = {"defaults", "hydra", "_target_", "_partial_"}


@dataclass(frozen=True)
class Setting:
    """A key of a file: its value in YAML ("" for a group of settings), its comment, and its place."""

    value: str
    comment: str
    place: str  # conf/loss/grpo.yaml:7


@dataclass(frozen=True)
class ConfFile:
    """`about` is the comment at the head, `builds` the `_target_`, `settings` are in order by key (`lora.rank`), those
    of base files included."""

    about: str
    builds: str | None
    settings: Mapping[str, Setting]


@functools.cache
def read_conf(file: Path) -> ConfFile:
    """One file of `conf/` and its bases. A key without a comment inherits the base's, or else that of the key above."""
    text = file.read_text(encoding="utf-8")
    lines, root = text.splitlines(), yaml.compose(text)
    values: dict[str, Any] = yaml.safe_load(text) or {}
    builds: str | None = values.get("_target_")
    settings: dict[str, Setting] = {}
    for base in map(read_conf, bases_of(file, values)):
        builds, settings = builds or base.builds, {**settings, **base.settings}
    above: dict[str, str] = {}
    head = _head(root, lines)
    for key, setting in _settings(root, [""] * head + lines[head:], _name(file)):
        group = key.rpartition(".")[0]
        shared = above.get(group, "") if setting.value else ""
        comment = setting.comment or (settings[key].comment if key in settings else shared)
        above[group] = comment if setting.value else ""
        settings[key] = replace(setting, comment=comment)
    return ConfFile(_above(lines, head), builds, settings)


def read_choice(group: str, choice: str) -> ConfFile:
    return read_conf(conf_file(f"{group}/{choice}"))


def flow(value: Any) -> str:
    """A value on one line, as typed after `key=`."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text


def _name(file: Path) -> str:
    if file.is_relative_to(EXPERIMENTAL):
        return f"grpo_cli/experimental/conf/{file.relative_to(EXPERIMENTAL)}"
    return f"conf/{file.relative_to(config_dir())}" if file.is_relative_to(config_dir()) else file.name


def _settings(node: Any, lines: Sequence[str], file: str, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value in _NO_SETTINGS and not prefix:
            continue
        row, below = key.start_mark.line, isinstance(value, yaml.MappingNode) and not value.flow_style
        text = "" if below else flow(yaml.constructor.SafeConstructor().construct_document(value))
        yield prefix + key.value, Setting(text, _above(lines, row), f"{file}:{row + 1}")
        if below:
            yield from _settings(value, lines, file, f"{prefix}{key.value}.")


def _head(root: Any, lines: Sequence[str]) -> int:
    """Return how many comment lines are the file's: one, if the rest directly precedes a setting and belongs to it."""
    end = next((row for row, line in enumerate(lines) if not line.startswith("#")), len(lines))
    first = root.value[0][0] if root is not None else None
    bare = first is not None and first.start_mark.line == end and first.value not in _NO_SETTINGS
    return min(1, end) if bare else end


def _above(lines: Sequence[str], row: int) -> str:
    """The comment directly above a row, on one line."""
    first = row
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    words = (line.strip().removeprefix("#").strip() for line in lines[first:row])
    return " ".join(line for line in words if not line.startswith("@package"))
