"""Reads the rollouts that a run (`rollouts.jsonl`) or an evaluation (`samples.jsonl`) has recorded.

Their text was written by a model: make it `visible` before printing it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.report.read import records
from grpo_cli.runs import layout
from grpo_cli.support.formatting import plain


@dataclass(frozen=True)
class Recorded:
    """One rollout as text. What its row lacks is None, or empty."""

    prompt_id: str
    prompt: str
    reply: str
    answer: str
    finish: str
    reason: str
    sample: int
    step: int | None
    length: int | None
    reward: float
    parts: Mapping[str, float]
    kept: bool
    advantage: float | None
    turns: tuple[tuple[bool, str], ...]  # (spoken by the environment, text)


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
    file = next((folder / name for name in (layout.ROLLOUTS, layout.SAMPLES) if (folder / name).is_file()), None)
    if file is None:
        return None
    steps: set[int] = set()
    notes: list[str] = []
    rollouts: list[Recorded] = []
    for row in records(file, _evaluated if file.name == layout.SAMPLES else _recorded, notes):
        if row.step is not None and step is None and row.step > max(steps, default=-1):
            rollouts.clear()
        steps |= set() if row.step is None else {row.step}
        if row.step == (max(steps, default=None) if step is None else step):
            rollouts.append(row)
    shown = max(steps, default=None) if step is None else step
    return Recording(file, shown, tuple(rollouts), tuple(sorted(steps)), tuple(notes))


def extremes(rollouts: Sequence[Recorded], best: int, worst: int) -> list[Recorded]:
    """Return the `best` highest rewards, then the `worst` lowest, each rollout once."""
    order = sorted(rollouts, key=lambda row: -math.inf if math.isnan(row.reward) else row.reward, reverse=True)
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
    words = [f"reward {row.reward:g}" + (f" ({parts})" if parts else "")]
    words += [f"advantage {row.advantage:+.3g}"] if row.advantage is not None else []
    words += [f"{row.length} tokens, {plain(row.finish)}"] if row.length is not None else []
    return [*words, "kept" if row.kept else plain(row.reason) if row.step is None else f"dropped: {plain(row.reason)}"]


def visible(text: str) -> str:
    r"""Return text of several lines that is safe to print: control and invisible characters are escaped.

    >>> visible("a\x1b[31m\tb\nc")
    'a\\x1b[31m\\tb\nc'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _evaluated(line: bytes) -> Recorded:
    return _recorded(line, has_step=False)


def _recorded(line: bytes, has_step: bool = True) -> Recorded:
    """Return one row. ValueError, TypeError, KeyError, AttributeError or OverflowError for any other line."""
    row: dict[str, Any] = {"answer": "", "finish": "", "reason": "", **json.loads(line)}
    texts = {name: row[name] for name in ("prompt_id", "prompt", "reply", "answer", "finish", "reason")}
    whole = {"sample": row["sample"], "step": row["step"] if has_step else None, "length": row.get("length")}
    if not all(type(text) is str for text in texts.values()) or {*map(type, whole.values())} - {int, type(None)}:
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
