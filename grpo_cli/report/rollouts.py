"""Reads the rollouts that a run (`rollouts.jsonl`) or an evaluation (`samples.jsonl`) has recorded.

Their text was written by a model: make it `visible` before printing it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from grpo_cli.report.lines import records
from grpo_cli.runs import layout
from grpo_cli.support.formatting import plain

RECORDS = (layout.ROLLOUTS, layout.SAMPLES)


@dataclass(frozen=True)
class Recorded:
    """One rollout as text. What its row lacks is None, or empty."""

    prompt_id: str
    sample: int
    prompt: str
    reply: str
    reward: float
    step: int | None = None
    answer: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    length: int | None = None
    finish: str = ""
    kept: bool = False
    reason: str = ""
    advantage: float | None = None
    turns: tuple[tuple[bool, str], ...] = ()  # (spoken by the environment, text)


@dataclass(frozen=True)
class Recording:
    """The rollouts of one step (None: an evaluation's), all steps in the file, and what could not be read."""

    file: Path
    step: int | None
    rollouts: tuple[Recorded, ...]
    steps: tuple[int, ...]
    notes: tuple[str, ...]


def read_recording(folder: Path, step: int | None = None) -> Recording | None:
    """Return the rollouts of a step, by default the last; None if the folder has no file of rollouts."""
    file = next((folder / name for name in RECORDS if (folder / name).is_file()), None)
    if file is None:
        return None
    rollouts: list[Recorded] = []
    steps: set[int] = set()
    notes: list[str] = []
    last: int | None = None
    for row in records(file, partial(_recorded, has_step=file.name == layout.ROLLOUTS), notes):
        if row.step is not None:
            steps.add(row.step)
            if last is None or row.step > last:
                last = row.step
                rollouts = rollouts if step is not None else []
        if row.step == (last if step is None else step):
            rollouts.append(row)
    return Recording(file, last if step is None else step, tuple(rollouts), tuple(sorted(steps)), tuple(notes))


def ranked(rollouts: Sequence[Recorded]) -> list[Recorded]:
    """Sort from the highest reward to the lowest, those without a number last."""
    return sorted(rollouts, key=lambda row: -math.inf if math.isnan(row.reward) else row.reward, reverse=True)


def extremes(rollouts: Sequence[Recorded], best: int, worst: int) -> list[Recorded]:
    """Return the `best` highest rewards, then the `worst` lowest, each rollout once."""
    order = ranked(rollouts)
    return order[:best] + order[max(best, len(order) - worst) :]


def by_prompt(rollouts: Sequence[Recorded]) -> dict[str, list[Recorded]]:
    """Return the rollouts of each prompt, in order of first appearance."""
    groups: dict[str, list[Recorded]] = {}
    for row in rollouts:
        groups.setdefault(row.prompt_id, []).append(row)
    return groups


def facts(row: Recorded) -> list[str]:
    """Return a rollout in words: its reward and its parts, advantage, length, and whether it was kept."""
    parts = ", ".join(f"{plain(name)} {value:g}" for name, value in row.parts.items())
    told = [f"reward {row.reward:g}" + (f" ({parts})" if parts else "")]
    told += [f"advantage {row.advantage:+.3g}"] if row.advantage is not None else []
    told += [f"{row.length} tokens, {plain(row.finish)}"] if row.length is not None else []
    fate = "kept" if row.kept else plain(row.reason) if row.step is None else f"dropped: {plain(row.reason)}"
    return [*told, fate]


def visible(text: str) -> str:
    r"""Return text of several lines that is safe to print: control and invisible characters are escaped.

    >>> visible("a\x1b[31m\tb\nc")
    'a\\x1b[31m\\tb\nc'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _recorded(line: bytes, has_step: bool) -> Recorded:
    """Return one row. ValueError, TypeError, KeyError, AttributeError or OverflowError for any other line."""
    row: dict[str, Any] = {"answer": "", "finish": "", "reason": "", **json.loads(line)}
    texts = {name: row[name] for name in ("prompt_id", "prompt", "reply", "answer", "finish", "reason")}
    whole = {"sample": row["sample"], "step": row["step"] if has_step else None, "length": row.get("length")}
    numbers = [number for number in whole.values() if number is not None]
    if not all(isinstance(text, str) for text in texts.values()) or not all(type(number) is int for number in numbers):
        raise TypeError("another type")
    return Recorded(
        **texts,
        **whole,
        reward=float(row["reward"]),
        parts={str(name): float(value) for name, value in row.get("parts", {}).items()},
        kept=row.get("kept") is True,
        advantage=None if row.get("advantage") is None else float(row["advantage"]),
        turns=tuple((bool(theirs), str(text)) for theirs, text in row.get("turns") or ()),
    )
