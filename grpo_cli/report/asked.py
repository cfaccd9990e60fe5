"""A run's settings as they are typed on a command line, from its record.

References such as `m: ${n}` are followed, but no resolver runs on what a file says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo_cli.runs.record import RunRecord, read_record
from grpo_cli.support.formatting import plain

Setting = str | int | float | bool | None

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class Asked:
    """The settings of a run by key: `optim.lr`, or a group's name for the choice made in it.

    `groups` are the names of the groups, `given` the keys that were on the command line, `references` those that follow
    another one (`m` follows `n`). A run without a config is not `complete`: `settings` are then only the given ones.
    """

    settings: Mapping[str, Setting] = field(default_factory=dict)
    groups: frozenset[str] = frozenset()
    given: tuple[str, ...] = ()
    references: Mapping[str, str] = field(default_factory=dict)
    complete: bool = False
    command: str = "train"

    @property
    def seed(self) -> Setting:
        return self.settings.get("seed")


def asked_of(folder: Path) -> Asked | None:
    """Return those of a run folder's record; None if there is none. UserError if it is damaged."""
    record = read_record(folder)
    return None if record is None else asked_by(record)


def asked_by(record: RunRecord) -> Asked:
    """Return those of a record."""
    settings = {key: value for key, value in _flat(dict(record.config), "") if ".recipe." not in key}
    references = {key: match[1] for key, value in settings.items() if (match := _REFERENCE.fullmatch(str(value)))}
    settings |= {key: settings[other] for key, other in references.items() if other in settings}
    given = dict(map(_override, record.overrides))
    choices = {plain(group): plain(choice) for group, choice in record.choices.items()}
    return Asked(settings | choices, frozenset(choices), tuple(given), references, True, record.command)


def asked_with(overrides: Sequence[str], command: str = "train") -> Asked:
    """Return those of a run without a config: the overrides that it was to be started with."""
    given = dict(map(_override, overrides))
    return Asked(given, given=tuple(given), command=command)


def _flat(value: Any, name: str) -> Iterator[tuple[str, Setting]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{plain(key)}" if name else plain(key))
    else:
        yield name, _setting(json.dumps(value, default=str).replace('"', "") if isinstance(value, list) else value)


def _setting(value: Any) -> Setting:
    """Return a setting, text as one printable line."""
    return value if value is None or isinstance(value, int | float) else plain(value)


def _override(word: Any) -> tuple[str, Setting]:
    """Turn `+optim.lr=1e-4` into the key and its value; `~optim.lr` to the key and nothing."""
    key, _, text = str(word).partition("=")
    key = plain(key.lstrip("+~").partition("@")[0])
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = text
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)  # YAML 1.1 reads 1e-4 as a string
    return key, _setting(value if value is None or isinstance(value, int | float) else text)
