"""Ranges of settings, said once beside their types: `steps: Annotated[int, Range(1)]`.

Settings and the constructors of parts declare them; `out_of_range` finds every value beyond its own.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, Unpack, get_args, get_origin, get_type_hints

from grpo_cli.support.errors import closest


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `above` and `below` leave out the end itself. `because` is the reason, or a way
    out, for the message."""

    low: float = -math.inf
    high: float = math.inf
    because: str = ""
    above: bool = False
    below: bool = False

    def problem(self, value: Any) -> str:
        """What is wrong with a value, nothing where it is no number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return ""
        after_low = value > self.low if self.above else value >= self.low
        before_high = value < self.high if self.below else value <= self.high
        return "" if after_low and before_high else f"must be {self.words}" + f": {self.because}" * bool(self.because)

    @property
    def words(self) -> str:
        low, high = (str(end) if isinstance(end, int) else f"{end:g}" for end in (self.low, self.high))
        starts = f"{'more than' if self.above else 'at least'} {low}"
        if self.high == math.inf:
            return starts
        ends = f"{'less than' if self.below else 'at most'} {high}"
        if self.low == -math.inf:
            return ends
        return f"{starts} and {ends}" if self.above or self.below else f"from {low} to {high}"


@dataclass(frozen=True)
class OneOf:
    """One of some words."""

    words: tuple[str, ...]

    def problem(self, value: Any) -> str:
        if value is None or value in self.words:
            return ""
        return f"must be one of {', '.join(self.words)}{closest(str(value), self.words)}"


Count = Annotated[int, Range(1)]
Share = Annotated[float, Range(0, 1)]


def out_of_range(kind: Any, values: Mapping[str, Any], key: str = "") -> Iterator[str]:
    """A line for each of `values` beyond what `kind`, a dataclass or a function, declares of it; `key` comes before
    their names."""
    plain = isinstance(kind, type) and not hasattr(kind, "__dataclass_fields__")
    target = kind.__init__ if plain else kind
    hints = declared(target, include_extras=True)
    for name, value in values.items():
        yield from _problems(hints.get(name), value, f"{key}.{name}" if key else name)


def declared(target: Any, include_extras: bool = False) -> dict[str, Any]:
    """The types of a class's fields or a function's arguments, those of `**words: Unpack[...]` among them."""
    hints = get_type_hints(target, include_extras=include_extras)
    for hint in tuple(hints.values()):
        if get_origin(hint) is Unpack:
            hints |= get_type_hints(get_args(hint)[0], include_extras=include_extras)
    return hints


def _problems(kind: Any, value: Any, key: str) -> Iterator[str]:
    if hasattr(kind, "__dataclass_fields__"):
        yield from out_of_range(kind, vars(value), key)
    elif get_origin(kind) is Annotated:
        for declared in kind.__metadata__:
            if isinstance(declared, Range | OneOf) and (problem := declared.problem(value)):
                yield f"{key}={value} {problem}"
    elif get_origin(kind) in (Union, types.UnionType):  # null, and a word, have no range
        for member in get_args(kind):
            yield from _problems(member, value, key)
    elif get_origin(kind) is tuple and isinstance(value, tuple | list):
        members = get_args(kind)
        members = members[:1] * len(value) if members[-1] is Ellipsis else members
        for index, (member, item) in enumerate(zip(members, value, strict=False)):
            yield from _problems(member, item, f"{key}[{index}]")
