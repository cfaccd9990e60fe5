"""A person's own reward function, `module:function`: called by its arguments' names, believed only when checked.

It is the person's code and runs in this process; what a model wrote reaches it as text.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from math import nan
from numbers import Real
from typing import Any

from grpo_cli.support.errors import UserError, own_code
from grpo_cli.tasks.judges import Completion
from grpo_cli.types import LARGEST_REWARD

# What a function may ask for by the names of its arguments: about one rollout, or lists about all of a step's.
ONE: Mapping[str, Callable[[Completion], Any]] = {
    "reply": lambda completion: completion.text,
    "turns": lambda completion: list(completion.turns),
    "answer": lambda completion: completion.answer,
    "question": lambda completion: None if completion.problem is None else completion.problem.question,
    "row": lambda completion: None if completion.problem is None else completion.problem.row,
    "finished": lambda completion: completion.finished,
    "length": lambda completion: completion.length,
}
MANY = {
    "replies": "reply",
    "answers": "answer",
    "questions": "question",
    "rows": "row",
    "finished": "finished",
    "lengths": "length",
}


class OwnReward:
    """The function as a judge. It returns a finite number, or named ones (`{"correct": 1.0, "brief": 0.2}`), for one
    rollout; or, if it takes `replies`, a list of those for all rollouts of a step."""

    main = None
    advice = "let it be text"

    def __init__(self, name: str, function: Callable[..., Any] | None = None) -> None:
        """The function of this name, if it is not given."""
        self._name = name
        self._function = _find(name) if function is None else function
        self._words, self._takes_many = _words(name, self._function)

    def gold(self, text: str) -> str | None:
        return text

    def __call__(self, completions: Sequence[Completion]) -> list[dict[str, float]]:
        if not completions:
            return []
        if not self._takes_many:
            values: Sequence[Any] = [
                self._called({word: ONE[word](completion) for word in self._words}, completion.place)
                for completion in completions
            ]
        else:
            kwargs = {word: [ONE[MANY[word]](completion) for completion in completions] for word in self._words}
            values = self._list(
                self._called(kwargs, f"the {len(completions)} rollouts from {completions[0].place} on"), completions
            )
        return [self._parts(value, completion) for value, completion in zip(values, completions, strict=True)]

    def _called(self, kwargs: Mapping[str, Any], place: str) -> Any:
        with own_code(f"task.reward={self._name}", lambda: f" for {place}, whose completion is {_shown(kwargs)}"):
            return self._function(**kwargs)

    def _list(self, values: Any, completions: Sequence[Completion]) -> Sequence[Any]:
        with own_code(f"task.reward={self._name}, whose answer is looked at,"):
            if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
                raise UserError(
                    f"task.reward={self._name} takes `replies` and must return a list with one reward for each, but "
                    f"returned {_short(values)} for the {len(completions)} rollouts from {completions[0].place} on"
                )
            if len(values) != len(completions):
                raise UserError(
                    f"task.reward={self._name} returned {len(values)} rewards for {len(completions)} rollouts (from "
                    f"{completions[0].place} to {completions[-1].place}); return one for each, in their order"
                )
            return list(values)

    def _parts(self, value: Any, completion: Completion) -> dict[str, float]:
        """The named parts; a single number is called after the function."""
        with own_code(f"task.reward={self._name}, whose answer for {completion.place} is looked at,"):
            parts = value if isinstance(value, Mapping) else {self._name.rpartition(":")[2]: value}
            if not parts:
                raise UserError(
                    f"task.reward={self._name} returned no part for {completion.place}; return at least one"
                )
            return {
                self._part_name(name, completion): self._number(name, part, completion) for name, part in parts.items()
            }

    def _part_name(self, name: Any, completion: Completion) -> str:
        if not isinstance(name, str) or not name or "/" in name:
            raise UserError(
                f"task.reward={self._name} called a part {_short(name)} for {completion.place}; a part's name is text "
                "without /"
            )
        return name

    def _number(self, name: Any, value: Any, completion: Completion) -> float:
        value = value.item() if hasattr(value, "item") and getattr(value, "size", 1) in (1, ()) else value
        number: Any = value if isinstance(value, Real) else nan
        if not abs(number) <= LARGEST_REWARD:
            raise UserError(
                f"task.reward={self._name} returned {_short(value)} as {name} for {completion.place}, whose completion "
                f"is {_short(completion.text)}; return a finite number from -2^53 to 2^53 (rewards are squared and "
                "added up, and larger ones lose their digits), or a dictionary of them"
            )
        return float(number)


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name or module_name.startswith("."):
        raise UserError(
            f"task.reward={name} must be numbers, math, or a function of your own written as module:function"
        )
    with own_code(f"task.reward={name}: the module {module_name}"):
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise UserError(
                f"task.reward={name}: the module {module_name} cannot be imported: {error}; it is looked for in the "
                "current folder and among what is installed"
            ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"task.reward={name}: {module_name} has no function {function_name}")
    return function


def _words(name: str, function: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """The names that it asks for, and whether they are those of many rollouts."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:  # some of what is written in C
        raise UserError(f"task.reward={name} cannot be asked for the names of its arguments; wrap it") from error
    takes_many = any(p.name in MANY and p.name not in ONE for p in parameters)
    known = MANY if takes_many else ONE
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [p.name for p in named if p.name not in known and p.default is p.empty]
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if unknown or by_place:
        raise UserError(
            f"task.reward={name} asks for {', '.join(unknown + by_place)}; by name it can have {', '.join(ONE)} of one "
            f"rollout, or lists of all: {', '.join(MANY)}"
        )
    return tuple(known if takes_any else [p.name for p in named if p.name in known]), takes_many


def _shown(kwargs: Mapping[str, Any]) -> str:
    """The completion that a call was about, if it asked for it."""
    return _short(kwargs.get("reply", kwargs.get("replies", "not asked for")))


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # of a whole number with more digits than Python writes, or of an object of one's own
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
