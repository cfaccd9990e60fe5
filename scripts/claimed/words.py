"""From records to words: means with their interval, differences of pairs, ratios of rounds, tables.

`a ± b` is a mean over seeds and half of its 95 % interval (Student's t). Arms are compared seed by seed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_cli.support.intervals import student_95

NO_DIFFERENCE = "no difference seen"
Runs = Mapping[str, Mapping[str, Any]]  # what an arm's run of each seed came to
Column = Callable[[Runs], str]


@dataclass(frozen=True)
class Records:
    """The JSON files that figures come from, by name; `others` are in other folders."""

    folder: Path
    others: Mapping[str, Path] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        return self.others.get(name, self.folder / f"{name}.json")

    def link(self, name: str) -> str:
        """As scripts/README.md has it."""
        return f"[{name}]({self.path(name).parent.name}/{name}.json)"

    def __getitem__(self, name: str) -> Any:
        return json.loads(self.path(name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Claim:
    """One row of the index. `figure` holds the number with its interval, `of` what it is a sample of."""

    what: str
    figure: str
    of: str
    command: str
    files: tuple[str, ...]


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval of a mean of at least two values."""
    return student_95(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5


def seeds(count: int) -> str:
    if count == 1:
        return "1 seed, no interval"
    return f"{count} seeds{', so a wide interval' * (count == 2)}"


def rounds(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds"


def interval(values: Iterable[float], digits: int = 3, sign: str = "") -> str:
    """`mean ± half-width`; the value alone where there is one."""
    numbers = list(values)
    shown = format(round(statistics.fmean(numbers), digits) + 0.0, f"{sign}.{digits}f")  # + 0.0: there is no -0.000
    return shown if len(numbers) == 1 else f"{shown} ± {half_width(numbers):.{digits}f}"


def difference(arm: Runs, base: Runs, key: str, digits: int = 3) -> str:
    """Of an arm and another one, seed by seed; NO_DIFFERENCE where the interval holds 0."""
    pairs = [arm[seed][key] - base[seed][key] for seed in sorted(arm.keys() & base.keys())]
    shown = interval(pairs, digits, "+")
    if len(pairs) == 1:
        return f"{shown} (1 seed, no interval)"
    holds_zero = abs(statistics.fmean(pairs)) <= half_width(pairs)
    return f"{shown}, {NO_DIFFERENCE}" if holds_zero else shown


def times(ratios: Sequence[float], digits: int = 2) -> str:
    """A mean ratio with its interval; NO_DIFFERENCE where that holds 1."""
    shown = interval(ratios, digits)
    alike = len(ratios) > 1 and abs(statistics.fmean(ratios) - 1) <= half_width(ratios)
    return f"{shown}, {NO_DIFFERENCE}" if alike else shown


def spread(values: Iterable[float], digits: int = 2) -> str:
    """The median of what some rounds came to, with the lowest and the highest."""
    numbers = list(values)
    shown = f"{statistics.median(numbers):.{digits}f}"
    return shown if len(numbers) == 1 else f"{shown} ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"


def ratios(mine: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Round by round."""
    return [a[key] / b[key] for a, b in zip(mine, base, strict=True)]


def in_every_seed(numbers: Sequence[float]) -> str:
    """Whether ratios of tokens or seconds are on one side of 1."""
    if all(number < 1 for number in numbers):
        return "earlier in every seed"
    return "later in every seed" if all(number > 1 for number in numbers) else "earlier in some seeds, later in others"


def between(values: Iterable[float], digits: int = 2) -> str:
    """`lowest to highest`, or the one value where they are the same when rounded."""
    numbers = list(values)
    low, high = (f"{end:.{digits}f}" for end in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *rows])


def arms(records: Mapping[str, Runs], names: Mapping[str, str], columns: Mapping[str, Column]) -> str:
    """A table with a row for each of these arms, by its name in the record."""
    rows = [[shown, *(column(records[arm]) for column in columns.values())] for arm, shown in names.items()]
    return table(["arm", *columns], rows)


def values(runs: Runs, key: str) -> list[float]:
    return [runs[seed][key] for seed in sorted(runs)]


def over_seeds(key: str, digits: int = 3) -> Column:
    return lambda runs: interval(values(runs, key), digits)


def mean(key: str, form: str = ",.0f") -> Column:
    return lambda runs: format(statistics.fmean(values(runs, key)), form)


def share(key: str) -> Column:
    return lambda runs: percent(statistics.fmean(values(runs, key)))


def each(key: str, digits: int = 2) -> Column:
    """The value of every seed."""
    return lambda runs: ", ".join(f"{value:.{digits}f}" for value in values(runs, key))


def against(base: Runs, key: str, digits: int = 3) -> Column:
    """The paired difference to the arm that all others are compared with; nothing beside itself."""
    return lambda runs: "" if runs == base else difference(runs, base, key, digits)


def reached(key: str) -> Column:
    """A share that some seeds never come to."""

    def column(runs: Runs) -> str:
        there = [value for value in values(runs, key) if value is not None]
        never = f"{len(runs) - len(there)} of {len(runs)} never" if len(there) < len(runs) else ""
        return ", ".join(filter(None, [*(f"{value:.2f}" for value in there), never]))

    return column


def sooner(found: Mapping[str, Any]) -> str:
    """How many times sooner than another arm, with the interval over seeds where all of them come there."""
    if not found["ratios"]:
        return "never"
    if not found["never"]:
        return times(found["ratios"])
    told = ", ".join(f"{ratio:.2f}" for ratio in found["ratios"])
    return f"{told}; {found['never']} of {len(found['ratios']) + found['never']} never"
