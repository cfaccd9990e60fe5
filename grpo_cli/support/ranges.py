"""Ranges of settings, declared beside their types: `steps: Annotated[int, Range(1)]`.

Settings and constructors of parts declare them; `config.read` checks them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from grpo_cli.support.errors import closest


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `above` and `below` exclude the end itself. `because` is the reason given."""

    low: float | int = -math.inf
    high: float | int = math.inf
    because: str = ""
    above: bool = False
    below: bool = False

    def problem(self, value: Any) -> str:
        """What is wrong with a value; empty if nothing, or if it is not a number."""
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
