"""A run's settings by key, from its record. No resolver runs on what a file contains."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.runs.record import RunRecord
from grpo_cli.settings import TOKENS
from grpo_cli.support.formatting import plain, shown

Setting = str | int | float | bool | None

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class RecordedSettings:
    """Settings by key: `optim.lr`, or a group's name for the choice made in it (`groups`).

    `typed` are the words of the command line, by key; all that is there without a record (`known` is False).
    """

    settings: Mapping[str, Setting]
    typed: Mapping[str, str] = field(default_factory=dict)
    groups: frozenset[str] = frozenset()
    command: str = "train"
    known: bool = True

    @property
    def seed(self) -> Setting:
        return self.settings.get("seed")


def words(settings: Mapping[str, Setting], keys: Iterable[str]) -> str:
    """Return some of the settings as they are typed."""
    return " ".join(f"{key}={shown(settings[key])}" for key in keys if key in settings)


def settings_of_record(record: RunRecord) -> RecordedSettings:
    """Return the settings of a record, references such as `m: ${n}` followed."""
    settings = {key: value for key, value in _flat(dict(record.config), "") if ".recipe." not in key}
    referred = {key: match[1] for key, value in settings.items() if (match := _REFERENCE.fullmatch(str(value)))}
    settings |= {key: settings[other] for key, other in referred.items() if other in settings}
    choices = {plain(group): plain(choice) for group, choice in record.choices.items()}
    typed = {_override(word)[0]: plain(word) for word in record.overrides if word != f"{TOKENS}=auto"}
    return RecordedSettings(settings | choices, typed, frozenset(choices), record.command)


def settings_of_overrides(overrides: Sequence[str], command: str) -> RecordedSettings:
    """Return the settings of a job that has no record yet: the overrides that it starts with."""
    typed = dict(map(_override, overrides))
    words = {_override(word)[0]: plain(word) for word in overrides}
    return RecordedSettings(typed, words, command=command, known=False)


def _flat(value: Any, name: str) -> Iterator[tuple[str, Setting]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{plain(key)}" if name else plain(key))
    elif isinstance(value, list):
        yield name, plain(json.dumps(value, default=str).replace('"', ""))
    else:  # text as one printable line
        yield name, value if value is None or isinstance(value, int | float) else plain(value)


def _override(word: str) -> tuple[str, Setting]:
    """Return the key and the value of `+optim.lr=1e-4`; of `~optim.lr` the key and nothing."""
    key, _, value = word.partition("=")
    return plain(key.lstrip("+~").partition("@")[0]), plain(value)
