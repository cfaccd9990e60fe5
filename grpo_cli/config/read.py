"""Parses plain values (from YAML and the command line) into typed settings, strictly, and reports all errors at once:
types, missing and unknown keys, and ranges declared beside the types (`support.ranges`).

The only conversion is from a whole number to a float: `true` is not a number, `2.0` not a whole one, `"3"` neither.
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

T = TypeVar("T")

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_CONTAINERS: Mapping[Any, tuple[type, str]] = {Mapping: (dict, "a group of settings"), Sequence: (list, "a list")}
_LARGEST = {int: 2**64, float: 3.4e38}  # the largest seed and float32
_MISSING = "???"


def read(kind: type[T], values: Any, problems: list[str]) -> T | None:
    """`values` as the dataclass `kind`, or None and at least one new line in `problems`."""
    found: list[str] = []
    result = _read(kind, values, "", found)
    problems += found
    return None if found else typing.cast(T, result)


def read_kwargs(target: Any, group: str, kwargs: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """A part's settings, parsed by its constructor's annotations (also `**words: Unpack[...]`); those without a plain
    type are unchanged."""
    hints = _hints(target)
    hints |= {name: hint for words in _unpacked(hints) for name, hint in words.items()}
    return {name: _read(hints.get(name), value, f"{group}.{name}", problems) for name, value in kwargs.items()}


def named_words(target: Any) -> set[str]:
    """The names in the `**words: Unpack[...]` of a class's constructor or a function."""
    return {name for words in _unpacked(_hints(target)) for name in words}


def _hints(target: Any) -> dict[str, Any]:
    constructor = isinstance(target, type) and not dataclasses.is_dataclass(target)
    return typing.get_type_hints(target.__init__ if constructor else target, include_extras=True)


def _unpacked(hints: Mapping[str, Any]) -> list[dict[str, Any]]:
    unpacked = [typing.get_args(hint)[0] for hint in hints.values() if typing.get_origin(hint) is typing.Unpack]
    return [typing.get_type_hints(words, include_extras=True) for words in unpacked]


def missing(key: str, value: Any) -> Iterator[str]:
    """A line for each missing value under `key`."""
    if value == _MISSING:
        yield f"{key} has no value; give {key}=..."
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from missing(f"{key}.{name}", item)


def _read(kind: Any, value: Any, key: str, problems: list[str]) -> Any:
    """The value parsed as `kind`; None if it is wrong. Types that are not plain take any value."""
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if value == _MISSING:
        problems.extend(missing(key, value))
    elif dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, key, problems)
    elif origin is typing.Annotated:
        found = _read(of[0], value, key, problems)
        problems.extend(f"{key}={found} {wrong}" for rule in kind.__metadata__ if (wrong := rule.problem(found)))
        return found
    elif origin in (typing.Union, types.UnionType):
        return _read_union(of, value, key, problems)
    elif origin is tuple:
        return _read_tuple(of, value, key, problems)
    elif origin in _CONTAINERS and not isinstance(value, _CONTAINERS[origin][0]):
        problems.append(f"{key}={shown(value)} must be {_CONTAINERS[origin][1]}")
    elif kind not in _NAMES:
        return value
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
    hints = typing.get_type_hints(kind, include_extras=True)
    problems.extend(f"{prefix}{name} is no setting{closest(name, hints)}" for name in value if name not in hints)
    problems.extend(f"{prefix}{name} is missing from the configuration" for name in hints if name not in value)
    fields = {name: _read(hints[name], value[name], prefix + name, problems) for name in hints if name in value}
    return None if problems else kind(**fields)


def _read_union(kinds: Sequence[Any], value: Any, key: str, problems: list[str]) -> Any:
    """A union of a type, null and literal words. `int | float` is a number."""
    if value is None and types.NoneType in kinds:
        return None
    words = [word for kind in kinds if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)]
    others = {kind for kind in kinds if kind is not types.NoneType and typing.get_origin(kind) is not typing.Literal}
    kind: Any = float if others == {int, float} else others.pop() if len(others) == 1 else None
    if not words or not isinstance(value, str):
        return _read(kind, value, key, problems)
    if value not in words:
        plain = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
        problems.append(f"{key}={value} must be {_NAMES[plain]}, or {' or '.join(words)}{closest(value, words)}")
    return value


def _read_tuple(kinds: tuple[Any, ...], value: Any, key: str, problems: list[str]) -> Any:
    any_number = kinds[-1] is Ellipsis
    if not isinstance(value, list) or not (any_number or len(value) == len(kinds)):
        problems.append(f"{key}={shown(value)} must be a list{'' if any_number else f' of {len(kinds)} values'}")
        return None
    kinds = kinds[:1] * len(value) if any_number else kinds
    items = zip(kinds, value, strict=True)
    return tuple(_read(item_kind, item, f"{key}[{i}]", problems) for i, (item_kind, item) in enumerate(items))
