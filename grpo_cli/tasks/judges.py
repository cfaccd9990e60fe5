"""The parts of a reward: `numbers` here, `math` in `math_judge.py`, your own in `own_reward.py`, a model in
`model_judge.py`; and the form and the length of a completion.

The published runs weigh the form in different ways (see conf/README.md); each part of it lies between 0 and 1,
`overlong` between -1 and 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Protocol, runtime_checkable

from grpo_cli.support.errors import UserError, refuse
from grpo_cli.support.ranges import Range
from grpo_cli.tasks.answers import equal, extract_answer, gold_answer
from grpo_cli.tasks.problems import Problem
from grpo_cli.types import LARGEST_REWARD, Reward, Rollout

GRADINGS = {"lenient": "correct", "strict": "correct_strict"}
FORMATS_ON = ("all", "wrong")
RESERVED = frozenset({"mean", "std", "kept_mean"})  # reward/<these> are metrics of their own
OVERLONG = "overlong"
OverlongTokens = Annotated[int | None, Range(1, because="it counts tokens; null is a fifth of sampling.max_new_tokens")]
Weight = Annotated[float, Range(-LARGEST_REWARD, LARGEST_REWARD)]

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_TAG_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_OPENED, _TURNED = "<think>\n", "\n</think>\n<answer>\n"
_CLOSED = re.compile(r"\n</answer>$", re.MULTILINE)
_FROM_THOUGHT_TO_ANSWER = re.compile(r"</think>\s{0,8}<answer>")


@dataclass(frozen=True)
class Completion:
    """One rollout as a judge reads it. `place` names it in messages, `answer` is its prompt's gold answer, `text` the
    last of the model's `turns`. Your own reward function and a model get the `problem`."""

    place: str
    text: str
    turns: tuple[str, ...]
    answer: str
    finished: bool
    length: int
    problem: Problem | None


@runtime_checkable
class Judge(Protocol):
    """Named parts of each completion's reward, none where it has come to no judgement. `advice` describes how an answer
    must be written for `gold` to read it.

    `main` is the one part that is rewarded; None where all parts are, each with a weight of 1.
    """

    @property
    def advice(self) -> str: ...

    @property
    def main(self) -> str | None: ...

    def gold(self, text: str) -> str | None:
        """Return the answer in a data set's answer field, or None if there is none."""

    def __call__(self, completions: Sequence[Completion]) -> Sequence[Mapping[str, float]]: ...


@dataclass(frozen=True)
class Numbers:
    """A judge of final answers that are numbers, compared exactly; see `answers.py`."""

    main: str
    advice: str = "end it with '#### 42', let it be a number, or have expressions judged with task.reward=math"

    def gold(self, text: str) -> str | None:
        value = gold_answer(text)
        return None if value is None else str(value)

    def __call__(self, completions: Sequence[Completion]) -> list[dict[str, float]]:
        parts = []
        for completion in completions:
            found = extract_answer(completion.text)
            right = equal(found.value, Fraction(completion.answer))
            parts.append({"correct": float(right), "correct_strict": float(right and found.strict)})
        return parts


class Weighing:
    """The way from a judge's parts to a reward: the sum of weight times part; every part is kept for the log.

    `weights` names the format parts that are computed (0: only logged; null: not at all) and may give the judge's own
    parts other weights. With `formats_on=wrong` the format counts in completions without the right answer only. `main`
    is the judge's; where it is given, the judge's parts are known, and a weight for any other is a UserError.
    """

    def __init__(self, weights: Mapping[str, Any], formats_on: str, main: str | None) -> None:
        given = {name: weight for name, weight in weights.items() if weight is not None}
        known = ("correct", *FORMATS, OVERLONG)
        problems = [
            f"task.weights.{name}={weight} must be a finite number from -2^53 to 2^53, or null for none"
            for name, weight in given.items()
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not abs(weight) <= LARGEST_REWARD
        ]
        unknown = [name for name in given if main is not None and name not in known]
        refuse(problems + [f"task.weights.{name} must be one of {', '.join(known)}" for name in unknown])
        self._weights = {name: float(weight) for name, weight in given.items()}
        self._formats_on, self._main = formats_on, main

    def reward(self, parts: Mapping[str, float], text: str, overlong: float) -> Reward:
        form = {name: measure(text) for name, measure in FORMATS.items() if name in self._weights}
        length = {OVERLONG: overlong} if OVERLONG in self._weights else {}
        if self._main is None:
            self._check(parts, form | length)
            weights = {name: self._weights.get(name, 1.0) for name in parts}
        else:
            weights = {self._main: self._weights.get("correct", 1.0)}
        answer_part = self._main or "correct"
        counts = self._formats_on == "all" or parts[answer_part] < 1
        formed = {name: self._weights[name] for name in [*(form if counts else ()), *length]}
        found = {**parts, **form, **length}
        total = sum(weight * found[name] for name, weight in weights.items())
        total += sum(weight * found[name] for name, weight in formed.items())
        return Reward(total, found, answer_part, {**weights, **formed})

    def _check(self, parts: Mapping[str, float], formats: Mapping[str, float]) -> None:
        """Raise UserError for parts of your own function that do not go together: only now they have names."""
        found = f"the reward function named the parts {', '.join(parts)}"
        if both := sorted(parts.keys() & formats.keys()):
            raise UserError(f"{found}, but task.weights.{both[0]} adds a part of that name: rename yours")
        if reserved := sorted(parts.keys() & RESERVED):
            raise UserError(f"{found}, but reward/{reserved[0]} is already a metric: rename the part")
        if unknown := self._weights.keys() - {*parts, *formats, "correct"}:
            raise UserError(f"{found}, so task.weights.{min(unknown)} weighs nothing: correct the name or remove it")
        if self._formats_on == "wrong" and "correct" not in parts:
            raise UserError(f"{found}, but task.formats_on=wrong needs one called correct: add it, or choose all")


def strict_format(text: str) -> float:
    """Return 1 for a completion that begins with the four tags in order, each on a line of its own; else 0.

    The format reward of open-r1: more may follow the line of the last tag, and a tag may occur again.
    """
    turned = text.find(_TURNED, len(_OPENED)) if text.startswith(_OPENED) else -1
    return float(turned >= 0 and _CLOSED.search(text, turned + len(_TURNED)) is not None)


def soft_format(text: str) -> float:
    """Return 1 less a hundredth for each character outside `<think>...</think> <answer>...</answer>`, at least 0.

    0 for a completion without the four tags in that order. The scale of PODS' single-GPU runs.
    """
    start = text.find("<think>")
    middle = _FROM_THOUGHT_TO_ANSWER.search(text, start) if start >= 0 else None
    end = text.find("</answer>", middle.end()) if middle else -1
    inside = end + len("</answer>") - start
    return max(0.0, 1.0 - 0.01 * (len(text) - inside)) if end >= 0 else 0.0


def tag_count(text: str) -> float:
    """Return a quarter for each of the four tags that occurs exactly once."""
    return sum(text.count(tag) == 1 for tag in TAGS) / len(TAGS)


def tag_lines(text: str) -> float:
    """Return a quarter for each of the four tags that stands exactly once at the edge of its line, as in open-r1."""
    return sum(text.count(tag) == 1 for tag in _TAG_LINES) / len(_TAG_LINES)


FORMATS: Mapping[str, Callable[[str], float]] = {
    "format": strict_format,
    "format_soft": soft_format,
    "tag_count": tag_count,
    "tag_lines": tag_lines,
}


def overlong(rollout: Rollout, tokens: int | None) -> float:
    """Return 0 up to L - c tokens, from there down to -1 at L in a straight line (DAPO, arXiv 2503.14476, equation 13).

    L is `sampling.max_new_tokens`, and c is `tokens`, at most L; None: a fifth of L, as published (4,096 of 20,480). In
    an episode all tokens count that L bounds, those of the environment among them.
    """
    longest = rollout.request.sampling.max_new_tokens
    within = max(1, longest // 5) if tokens is None else tokens
    return min(0.0, (longest - within - len(rollout)) / within)
