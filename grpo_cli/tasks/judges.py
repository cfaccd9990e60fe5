"""The parts of a reward: `numbers` here, `math` in `math_judge.py`, your own in `own_reward.py`, a model in
`model_judge.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field

from grpo_cli.metric_names import METRICS
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.answers import final_number, reference_number
from grpo_cli.tasks.formats import FORMATS, OVERLONG, OverlongTokens, overlong
from grpo_cli.tasks.problems import Problem, of_json
from grpo_cli.types import LARGEST_REWARD, Reward, Rollout

GRADINGS = {"lenient": "correct", "strict": "correct_strict"}
FORMATS_ON = ("all", "wrong")
Weight = Annotated[float, Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]
Weights = Mapping[str, Weight | None] | None


@dataclass(frozen=True)
class Completion:
    """One rollout as a judge reads it; a reward function may take all but `place` and `problem` by these names.

    `place` names it in messages, `reference` is its prompt's answer, `reply` the last of the model's `turns`.
    """

    place: str
    turns: list[str]
    reference: str
    finished: bool
    length: int
    problem: Problem

    @property
    def reply(self) -> str:
        return self.turns[-1] if self.turns else ""

    @property
    def question(self) -> str:
        return self.problem.question

    @property
    def row(self) -> Any:
        return of_json(self.problem.row)


class Judge(ABC):
    """A source of named parts of each completion's reward, none where it has come to no judgement. `advice` describes
    how an answer must be written for `reference` to read it; any text will do unless a judge overrides it.

    `main` is the one part that is rewarded; None where all parts are, each with a weight of 1.
    """

    main: str | None = None
    advice = "let it be text"

    def reference(self, text: str) -> str | None:
        """Return the reference in a data set's answer field, or None if there is none."""
        return text

    def take_metrics(self) -> Mapping[str, float]:
        """Return the judge's own metrics since the last call."""
        return {}

    @abstractmethod
    def __call__(self, completions: Sequence[Completion]) -> Sequence[Mapping[str, float]]: ...


class Numbers(Judge):
    """A judge of final answers that are numbers, compared exactly; see `answers.py`."""

    advice = "end it with '#### 42', let it be a number, or have expressions judged with task.reward=math"

    def __init__(self, main: str) -> None:
        self.main = main

    def reference(self, text: str) -> str | None:
        value = reference_number(text)
        return None if value is None else str(value)

    def __call__(self, completions: Sequence[Completion]) -> list[dict[str, float]]:
        parts = []
        for completion in completions:
            value, marked = final_number(completion.reply)
            right = value == Fraction(completion.reference)
            parts.append({"correct": float(right), "correct_strict": float(right and marked)})
        return parts


class Weighing:
    """The way from a judge's parts to a reward: the sum of weight times part; every part is kept for the log.

    `weights` names the format parts that are computed (0: only logged; null: not at all) and may give the judge's own
    parts other weights. With `formats_on=wrong` the format counts in completions without the right answer only. `main`
    is the judge's; where it is given, the judge's parts are known, and a weight for any other is a UserError.
    `overlong_tokens` are those of the part `overlong`.
    """

    def __init__(self, weights: Weights, formats_on: str, main: str | None, overlong_tokens: OverlongTokens) -> None:
        given = (weights or {}).items()
        self._weights = {name: float(one or 0) for name, one in given if one is not None or name == "correct"}
        self._formats_on, self._main, self._overlong_tokens = formats_on, main, overlong_tokens
        known = ("correct", *FORMATS, OVERLONG)
        if main is not None and (unknown := self._weights.keys() - set(known)):
            raise UserError(f"task.weights.{min(unknown)} must be one of {', '.join(known)}")

    def reward(self, parts: Mapping[str, float], text: str, rollout: Rollout) -> Reward:
        form = {name: measure(text) for name, measure in FORMATS.items() if name in self._weights}
        length = {OVERLONG: overlong(rollout, self._overlong_tokens)} if OVERLONG in self._weights else {}
        if self._main is None:
            self._check(parts, form | length)
        answer_part = self._main or (next(iter(parts)) if len(parts) == 1 else "correct")
        rewarded = {self._main: "correct"} if self._main else {name: name for name in parts}
        weights = {part: self._weights.get(name, 1.0) for part, name in rewarded.items()}
        counts = self._formats_on == "all" or parts[answer_part] < 1
        weights |= {name: self._weights[name] for name in [*(form if counts else ()), *length]}
        found = {**parts, **form, **length}
        return Reward(sum(weight * found[name] for name, weight in weights.items()), found, answer_part, weights)

    def _check(self, parts: Mapping[str, float], formats: Mapping[str, float]) -> None:
        """Raise UserError for parts of your own function that do not go together: only now they have names."""
        found = f"the reward function named the parts {', '.join(parts)}"
        if taken := sorted(name for name in parts if name in formats or f"reward/{name}" in METRICS):
            raise UserError(f"{found}, but reward/{taken[0]} is a metric already: rename yours")
        given = {name for name, weight in self._weights.items() if (name, weight) != ("correct", 1.0)}
        if unknown := given - {*parts, *formats}:
            raise UserError(f"{found}, so task.weights.{min(unknown)} weighs nothing: correct the name or remove it")
        if self._formats_on == "wrong" and "correct" not in parts:
            raise UserError(f"{found}, but task.formats_on=wrong needs one called correct: add it, or choose all")
