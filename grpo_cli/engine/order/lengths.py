"""Observed lengths: running means, how well predictions rank them, and those recorded by a run."""

from __future__ import annotations

import json
from bisect import bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from grpo_cli.runs.files import regular
from grpo_cli.support.errors import UserError


def kendall_tau(first: Sequence[int | float], second: Sequence[int | float]) -> float:
    """Kendall's tau-b: 1 if both rank everything alike, -1 if in reverse; corrected for ties.

    0 where it is undefined because one of them ranks nothing (all values equal, or fewer than two).
    Knight's algorithm: sorted by `first`, the pairs that disagree are the inversions of `second`.
    """
    pairs = sorted(zip(first, second, strict=True))
    inversions = 0
    seen: list[int | float] = []
    for place, (_, value) in enumerate(pairs):
        inversions += place - bisect_right(seen, value)
        insort(seen, value)
    all_pairs = _pairs([len(pairs)])
    tied_first = _pairs(Counter(first).values())
    tied_second = _pairs(Counter(second).values())
    untied = (all_pairs - tied_first) * (all_pairs - tied_second)
    if untied == 0:
        return 0.0
    agreeing_less_inverted = all_pairs - tied_first - tied_second + _pairs(Counter(pairs).values()) - 2 * inversions
    return float(agreeing_less_inverted / untied**0.5)


def _pairs(counts: Iterable[int]) -> int:
    return sum(count * (count - 1) // 2 for count in counts)


MAX_PROMPTS = 50_000  # with a mean of their own: 13 MB of memory, and 2.4 MB of each checkpoint


Decay = Annotated[float, Field(gt=0, le=1)]


class LengthMeans:
    """Running means of lengths, of each prompt and of all. Each `add` multiplies the weight of earlier ones by `decay`.

    Only the `max_prompts` most recently added prompts have a mean of their own.
    """

    def __init__(self, decay: float, max_prompts: int = MAX_PROMPTS) -> None:
        self._decay = decay
        self._max_prompts = max_prompts
        self._prompts: OrderedDict[str, tuple[float, float]] = OrderedDict()  # id: (weight, weighted sum), newest last
        self._all = (0.0, 0.0)

    def mean(self, prompt_id: str) -> float | None:
        """This prompt's mean if it was seen, else that of all; None before anything was added."""
        weight, total = self._prompts.get(prompt_id, self._all)
        return total / weight if weight else None

    def seen(self, prompt_id: str) -> bool:
        return prompt_id in self._prompts

    def add(self, lengths: Iterable[tuple[str, int]]) -> None:
        """One `generate`'s lengths, each with its prompt's id."""
        by_prompt: dict[str, list[int]] = {}
        for prompt_id, length in lengths:
            by_prompt.setdefault(prompt_id, []).append(length)
        for prompt_id, values in by_prompt.items():
            self._prompts[prompt_id] = self._added(self._prompts.pop(prompt_id, (0.0, 0.0)), values)
        self._forget()
        if by_prompt:
            self._all = self._added(self._all, [value for values in by_prompt.values() for value in values])

    def _added(self, old: tuple[float, float], values: Sequence[int]) -> tuple[float, float]:
        return self._decay * old[0] + len(values), self._decay * old[1] + sum(values)

    def _forget(self) -> None:
        while len(self._prompts) > self._max_prompts:
            self._prompts.popitem(last=False)

    def state(self) -> dict[str, Any]:
        """Plain values; prompts in the order in which they will be forgotten."""
        return {"prompts": {name: list(pair) for name, pair in self._prompts.items()}, "all": list(self._all)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        kept = {name: (float(weight), float(total)) for name, (weight, total) in state["prompts"].items()}
        self._prompts = OrderedDict(kept)
        self._forget()
        weight, total = state["all"]
        self._all = (float(weight), float(total))


@dataclass(frozen=True)
class TraceRow:
    """The length of one rollout of an earlier run."""

    step: int
    prompt_id: str
    sample: int
    length: int


def read_trace(path: str | Path, key: str = "predictor.lengths") -> list[TraceRow]:
    """The rows of a run's `rollouts.jsonl`. Raises UserError, with the line, for any other file. `key` is the setting
    that named it."""
    rows = []
    try:
        with open(path, encoding="utf-8", opener=regular) as lines:
            for number, line in enumerate(lines, start=1):
                rows.append(_trace_row(line, f"{key}={path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}={path} cannot be read ({error}): give the rollouts.jsonl of an earlier run") from error
    if not rows:
        raise UserError(f"{key}={path} has no rollouts: record some with record.rollouts=-1 (all of each step)")
    return rows


def _trace_row(line: str, place: str) -> TraceRow:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not JSON ({error}): give the rollouts.jsonl of an earlier run") from error
    found = {name: row.get(name) if isinstance(row, dict) else None for name in ("step", "sample", "length")}
    numbers = [value for value in found.values() if isinstance(value, int) and value >= 0]
    prompt_id = row.get("prompt_id") if isinstance(row, dict) else None
    if len(numbers) < len(found) or not isinstance(prompt_id, str) or found["length"] == 0:
        raise UserError(
            f"{place} needs a text prompt_id and the whole numbers step, sample and length (1 or more), "
            f"found prompt_id={prompt_id!r} {found}: give the rollouts.jsonl of an earlier run"
        )
    step, sample, length = numbers
    return TraceRow(step, prompt_id, sample, length)
