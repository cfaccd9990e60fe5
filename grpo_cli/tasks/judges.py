"""Who says whether completions are right: `numbers` here, `math` in `math_judge.py`, one's own function in `own.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

from grpo_cli.support.errors import UserError, refuse
from grpo_cli.tasks.answers import equal, extract_answer, gold_answer
from grpo_cli.tasks.formats import FORMATS
from grpo_cli.tasks.problems import Problem
from grpo_cli.types import LARGEST_REWARD, Reward

GRADINGS = {"lenient": "correct", "strict": "correct_strict"}
FORMATS_ON = ("all", "wrong")
RESERVED = frozenset({"mean", "std", "kept_mean"})  # of reward/<part>: these names are metrics of their own


@dataclass(frozen=True)
class Completion:
    """One rollout as a judge reads it. `place` names it to a person, `answer` is what its prompt carries. `text` is the
    last of the model's `turns`.

    `problem` is None for a prompt that did not come from this task.
    """

    place: str
    text: str
    turns: tuple[str, ...]
    answer: str
    finished: bool
    length: int
    problem: Problem | None


@runtime_checkable
class Judge(Protocol):
    """Named parts of each completion's reward. `advice` tells how an answer has to be written for `gold` to read it.

    `main` is the part that alone counts as the answer's reward; None if all parts count, each with a weight of 1.
    """

    @property
    def advice(self) -> str: ...

    @property
    def main(self) -> str | None: ...

    def gold(self, text: str) -> str | None:
        """A data set's answer field as an answer, or None if it holds none."""

    def __call__(self, completions: Sequence[Completion]) -> Sequence[Mapping[str, float]]: ...


@dataclass(frozen=True)
class Numbers:
    """The final answer is a number, compared exactly; see `answers.py`."""

    main: str
    advice: str = "end it with '#### 42', let it be a number, or have expressions judged with task.reward=math"

    def gold(self, text: str) -> str | None:
        value = gold_answer(text)
        return None if value is None else str(value)

    def __call__(self, completions: Sequence[Completion]) -> list[dict[str, float]]:
        return [self._parts(completion) for completion in completions]

    def _parts(self, completion: Completion) -> dict[str, float]:
        found = extract_answer(completion.text)
        correct = equal(found.value, Fraction(completion.answer))
        return {"correct": float(correct), "correct_strict": float(correct and found.strict)}


@dataclass(frozen=True)
class Weighing:
    """From a judge's parts to a reward: the total is the sum of weight times part, and every part is kept for the log.

    `weights` names the form's parts that are looked at (0: only logged) and gives those of the judge other weights.
    With `formats_on=wrong` the form counts in completions without the right answer only.
    """

    weights: Mapping[str, float]
    formats_on: str
    main: str | None

    def reward(self, parts: Mapping[str, float], text: str) -> Reward:
        forms = {name: form(text) for name, form in FORMATS.items() if name in self.weights}
        self._check(parts, forms)
        answer_part = self.main or "correct"
        judged = {name: self.weights.get(name, 1.0) for name in parts}
        if self.main is not None:
            judged = {self.main: self.weights.get("correct", 1.0)}
        form_counts = self.formats_on == "all" or parts[answer_part] < 1
        formed = {name: self.weights[name] for name in forms} if form_counts else {}
        total = sum(weight * parts[name] for name, weight in judged.items())
        total += sum(weight * forms[name] for name, weight in formed.items())
        return Reward(total, {**parts, **forms}, answer_part, {**judged, **formed})

    def _check(self, parts: Mapping[str, float], forms: Mapping[str, float]) -> None:
        """A person's own function may name its parts as it likes: what does not go together shows only now."""
        if self.main is not None:
            return
        found = f"the reward function named the parts {', '.join(parts)}"
        if both := sorted(parts.keys() & forms.keys()):
            raise UserError(f"{found}, but task.weights.{both[0]} adds a part of that name: call yours something else")
        if reserved := sorted(parts.keys() & RESERVED):
            raise UserError(f"{found}, but reward/{reserved[0]} is a metric already: call the part something else")
        if lost := [name for name in self.weights if name not in parts and name not in forms and name != "correct"]:
            raise UserError(f"{found}, so task.weights.{lost[0]} weighs nothing: correct the name or remove it")
        if self.formats_on == "wrong" and "correct" not in parts:
            raise UserError(f"{found}, but task.formats_on=wrong needs one called correct: add it, or choose all")


def weighing(weights: Mapping[str, Any], formats_on: str, main: str | None) -> Weighing:
    """The weights that are given, once they are known to go together. A weight of null is none."""
    given = {name: weight for name, weight in weights.items() if weight is not None}
    known = ("correct", *FORMATS)
    problems = []
    for name, weight in given.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not abs(weight) <= LARGEST_REWARD:
            problems.append(
                f"task.weights.{name}={weight} must be a finite number from -2^53 to 2^53, or null for none"
            )
        if main is not None and name not in known:
            problems.append(f"task.weights.{name} is none of the parts {', '.join(known)}")
    if formats_on not in FORMATS_ON:
        problems.append(f"task.formats_on={formats_on} must be one of {', '.join(FORMATS_ON)}")
    refuse(problems)
    return Weighing({name: float(weight) for name, weight in given.items()}, formats_on, main)
