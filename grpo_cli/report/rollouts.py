"""Reads the rollouts that a run (`rollouts.jsonl`) or an evaluation (`samples.jsonl`) has recorded.

Their text was written by a model: make it `visible` before printing it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from grpo_cli.report.read import records
from grpo_cli.runs.layout import ROLLOUTS, SAMPLES
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain

_Number = Annotated[float, Field(strict=False)]  # which may be written as "NaN"


class Recorded(BaseModel, frozen=True, strict=True):
    """One rollout as text. What its row lacks is None, or empty; an evaluation's has no step."""

    prompt_id: str
    sample: int
    prompt: str
    reply: str
    reward: _Number
    step: int | None = None
    answer: str = ""
    parts: Mapping[str, _Number] = {}
    length: int | None = None
    finish: str = ""
    kept: bool = False
    reason: str = ""
    advantage: _Number | None = None
    turns: tuple[tuple[bool, str], ...] = ()  # (written by the environment, text)

    def facts(self) -> list[str]:
        """Return it in words: its reward and its parts, advantage, length, and whether it was kept."""
        parts = ", ".join(f"{plain(name)} {value:g}" for name, value in self.parts.items())
        words = [f"reward {self.reward:g}" + (f" ({parts})" if parts else "")]
        words += [f"advantage {self.advantage:+.3g}"] if self.advantage is not None else []
        words += [] if self.length is None else [f"{self.length} token{'s' * (self.length != 1)}, {plain(self.finish)}"]
        dropped = "" if self.step is None else "dropped: "
        return [*words, "kept" if self.kept else dropped + plain(self.reason)]


@dataclass(frozen=True)
class Recording:
    """The rollouts of one step (None: an evaluation's), all steps in the file, and what could not be read."""

    file: Path
    step: int | None
    rollouts: tuple[Recorded, ...]
    steps: tuple[int, ...]
    notes: tuple[str, ...]


def read_recording(folder: Path, step: int | None = None) -> Recording:
    """Return the rollouts of a step, by default the last. UserError if the folder has no file of rollouts."""
    file = next((folder / name for name in (ROLLOUTS, SAMPLES) if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{plain(folder)} holds no rollouts; grpo ls lists runs")
    steps, notes, found, last = set[int](), list[str](), list[Recorded](), step
    for row in records(file, Recorded.model_validate_json, notes):
        steps |= set() if row.step is None else {row.step}
        if step is None and last != max(steps, default=None):
            found, last = [], max(steps)
        if row.step == last:
            found.append(row)
    return Recording(file, last, tuple(found), tuple(sorted(steps)), tuple(notes))


def extremes(rollouts: Sequence[Recorded], best: int, worst: int) -> list[Recorded]:
    """Return the `best` highest rewards, then the `worst` lowest, each rollout once."""
    order = sorted(rollouts, key=lambda row: -math.inf if math.isnan(row.reward) else row.reward, reverse=True)
    return order[:best] + order[max(best, len(order) - worst) :]


def before_and_after(runs: Mapping[str, Path]) -> str | None:
    """Return of each run, by its label, the rollouts of a prompt at the first and the last step that recorded it, in
    Markdown: of one prompt for all where it can be, and of unlike rewards. None if no run has recorded two steps."""
    seen = {label: _rewards(folder) for label, folder in runs.items()}
    seen = {label: found for label, found in seen.items() if len(set[int]().union(*found.values())) > 1}
    arms = Counter(prompt for found in seen.values() for prompt, steps in found.items() if len(steps) > 1)
    lines = ["# A prompt's rollouts, early and late", ""]
    for label, found in seen.items():
        merits = {
            prompt: (arms[prompt], len(steps[min(steps)] | steps[max(steps)]) > 1, max(steps) - min(steps))
            for prompt, steps in found.items()
            if len(steps) > 1
        }
        candidates = [max(merits, key=lambda prompt: merits[prompt])] if merits else [*found]
        groups = [(step, prompt) for prompt in candidates for step in found[prompt]]
        lines += [f"## {label}", "", *([] if merits else ["No prompt was recorded twice, so these are two.", ""])]
        ends = min(groups), max(groups)
        rows = records(runs[label] / ROLLOUTS, Recorded.model_validate_json, [])
        kept = sorted((row for row in rows if (row.step, row.prompt_id) in ends), key=lambda row: row.sample)
        for end in ends:
            group = [row for row in kept if (row.step, row.prompt_id) == end]
            lines += [f"### Step {end[0]}, prompt {plain(end[1])}", "", *_indented(group[0].prompt), ""]
            lines += ["Its answer:", "", *_indented(group[0].answer), ""]
            for row in group:
                lines += [f"- {', '.join(row.facts())}", "", *_indented(row.reply, 8), ""]
    return "\n".join(lines) if seen else None


def _rewards(folder: Path) -> dict[str, dict[int, set[float]]]:
    """Return the rewards that a run has recorded, by prompt and step."""
    found: dict[str, dict[int, set[float]]] = {}
    for row in records(folder / ROLLOUTS, Recorded.model_validate_json, []):
        if row.step is not None:
            found.setdefault(row.prompt_id, {}).setdefault(row.step, set()).add(row.reward)
    return found


def _indented(text: str, by: int = 4) -> list[str]:
    return [" " * by + line for line in visible(text).split("\n")]  # which Markdown shows as it is


def visible(text: str) -> str:
    r"""Return text of several lines that is safe to print: control and invisible characters are escaped.

    >>> visible("a\x1b[31m\tb\nc")
    'a\\x1b[31m\\tb\nc'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
