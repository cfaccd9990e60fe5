"""Plain values (what YAML and the command line yield) to dataclasses, strictly and with everything wrong said at once.

Nothing is converted but a whole number to a float: `true` is no number, `2.0` no whole number, `"3"` neither.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from grpo_cli.support.errors import closest
from grpo_cli.support.formatting import is_a, shown
from grpo_cli.support.ranges import declared

T = TypeVar("T")

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_LARGEST = {int: 2**64, float: 3.4e38}  # seeds end there, and float32
_MISSING = "???"


def read(kind: type[T], values: Any, problems: list[str]) -> T | None:
    """`values` as the dataclass `kind`, or None and at least one more line in `problems`."""
    found: list[str] = []
    result = _read(kind, values, "", found)
    problems += found
    return None if found else typing.cast(T, result)


def read_kwargs(target: Any, group: str, kwargs: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """A part's settings as its constructor declares them, where that is a plain type; the rest as it is."""
    plain = isinstance(target, type) and not dataclasses.is_dataclass(target)
    hints = declared(target.__init__ if plain else target)
    return {
        name: _read(kind, value, f"{group}.{name}", problems) if _is_plain(kind := hints.get(name)) else value
        for name, value in kwargs.items()
    }


def _is_plain(kind: Any) -> bool:
    only = _without_none(kind)
    return only in _NAMES or typing.get_origin(only) in (Mapping, Sequence)


def missing(key: str, value: Any) -> Iterator[str]:
    """A line for each value under `key` that has yet to be given."""
    if value == _MISSING:
        yield f"{key} has no value; give {key}=..."
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from missing(f"{key}.{name}", item)


def _read(kind: Any, value: Any, key: str, problems: list[str]) -> Any:
    if value == _MISSING:
        problems.extend(missing(key, value))
    elif dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, key, problems)
    elif typing.get_origin(kind) is tuple:
        return _read_tuple(typing.get_args(kind), value, key, problems)
    elif typing.get_origin(kind) is Mapping:
        if isinstance(value, dict):
            return value
        problems.append(f"{key}={shown(value)} must be a group of settings")
    elif typing.get_origin(kind) is Sequence:
        if isinstance(value, list):
            return value
        problems.append(f"{key}={shown(value)} must be a list")
    elif _is_optional(kind):
        absent = value is None and types.NoneType in typing.get_args(kind)
        return None if absent else _read(_without_none(kind), value, key, problems)
    elif typing.get_origin(kind) is typing.Union:  # of a kind, and of words that stand for themselves
        other, words = typing.get_args(kind)
        if isinstance(value, str) and value not in (known := typing.get_args(words)):
            problems.append(f"{key}={value} must be {_NAMES[other]}, or {' or '.join(known)}{closest(value, known)}")
            return None
        return value if isinstance(value, str) else _read(other, value, key, problems)
    elif not is_a(kind, value):
        problems.append(f"{key}={shown(value)} must be {_NAMES[kind]}")
    elif kind in _LARGEST and not abs(value) <= _LARGEST[kind]:
        endless = isinstance(value, float) and not math.isfinite(value)
        found = f"a number of {len(str(abs(value)))} digits" if isinstance(value, int) else str(value)
        problems.append(f"{key}={found} must be {'finite' if endless else f'at most {_LARGEST[kind]:.3g}'}")
    else:
        return float(value) if kind is float else value
    return None


def _read_fields(kind: Any, value: Any, key: str, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        problems.append(f"{key}={shown(value)} must be a group of settings")
        return None
    prefix = f"{key}." if key else ""
    hints = typing.get_type_hints(kind)
    problems.extend(f"{prefix}{name} is no setting{closest(name, hints)}" for name in value if name not in hints)
    problems.extend(f"{prefix}{name} is missing from the configuration" for name in hints if name not in value)
    fields = {name: _read(hints[name], value[name], prefix + name, problems) for name in hints if name in value}
    return None if problems else kind(**fields)


def _read_tuple(kinds: tuple[Any, ...], value: Any, key: str, problems: list[str]) -> Any:
    any_number = kinds[-1] is Ellipsis
    if not isinstance(value, list) or not (any_number or len(value) == len(kinds)):
        problems.append(f"{key}={shown(value)} must be a list{'' if any_number else f' of {len(kinds)} values'}")
        return None
    kinds = kinds[:1] * len(value) if any_number else kinds
    items = zip(kinds, value, strict=True)
    return tuple(_read(item_kind, item, f"{key}[{i}]", problems) for i, (item_kind, item) in enumerate(items))


def _is_optional(kind: Any) -> bool:
    """Whether it is a union with null, or of whole and broken numbers."""
    return isinstance(kind, types.UnionType) or types.NoneType in typing.get_args(kind)


def _without_none(kind: Any) -> Any:
    """The kind of a value that may be absent. What may be a whole or a broken number is a number."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    members = set(typing.get_args(kind)) - {types.NoneType} if union else {kind}
    return float if members == {int, float} else members.pop() if len(members) == 1 else None
