"""A person's own reward function, `module:function`: called by its arguments' names, believed only when checked.

It is the person's code and runs in this process; what a model wrote reaches it as text.
"""

from __future__ import annotations

import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from grpo_cli.errors import UserError
from grpo_cli.tasks.judges import Reply

# What a function may ask for by the names of its arguments: about one rollout, or lists about all of a step's.
ONE: Mapping[str, Callable[[Reply], Any]] = {
    "reply": lambda reply: reply.text,
    "answer": lambda reply: reply.answer,
    "question": lambda reply: None if reply.problem is None else reply.problem.question,
    "row": lambda reply: None if reply.problem is None else reply.problem.row,
    "finished": lambda reply: reply.finished,
    "length": lambda reply: reply.length,
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

    def __init__(self, name: str) -> None:
        self._name = name
        self._function = _find(name)
        self._words, self._takes_many = _words(name, self._function)

    def gold(self, text: str) -> str | None:
        return text

    def __call__(self, replies: Sequence[Reply]) -> list[dict[str, float]]:
        if not replies:
            return []
        if not self._takes_many:
            values: Sequence[Any] = [
                self._called({word: ONE[word](reply) for word in self._words}, reply.place) for reply in replies
            ]
        else:
            words = {word: [ONE[MANY[word]](reply) for reply in replies] for word in self._words}
            values = self._list(self._called(words, f"the {len(replies)} rollouts from {replies[0].place} on"), replies)
        return [self._parts(value, reply) for value, reply in zip(values, replies, strict=True)]

    def _called(self, words: Mapping[str, Any], place: str) -> Any:
        try:
            return self._function(**words)
        except Exception as error:  # it is the person's own: whatever it raises is theirs to know, with its line
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"task.reward={self._name} raised {type(error).__name__}: {error} ({last.filename}, line "
                f"{last.lineno}) for {place}, whose reply is {_shown(words)}"
            ) from error

    def _list(self, values: Any, replies: Sequence[Reply]) -> Sequence[Any]:
        if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
            raise UserError(
                f"task.reward={self._name} takes `replies` and must return a list with one reward for each, but "
                f"returned {_short(values)} for the {len(replies)} rollouts from {replies[0].place} on"
            )
        if len(values) != len(replies):
            raise UserError(
                f"task.reward={self._name} returned {len(values)} rewards for {len(replies)} rollouts (from "
                f"{replies[0].place} to {replies[-1].place}); return one for each, in their order"
            )
        return list(values)

    def _parts(self, value: Any, reply: Reply) -> dict[str, float]:
        """The named parts; a single number is called after the function."""
        parts = value if isinstance(value, Mapping) else {self._name.rpartition(":")[2]: value}
        if not parts:
            raise UserError(f"task.reward={self._name} returned no part for {reply.place}; return at least one")
        return {self._part_name(name, reply): self._number(name, part, reply) for name, part in parts.items()}

    def _part_name(self, name: Any, reply: Reply) -> str:
        if not isinstance(name, str) or not name or "/" in name:
            raise UserError(
                f"task.reward={self._name} called a part {name!r} for {reply.place}; a part's name is text without /"
            )
        return name

    def _number(self, name: Any, value: Any, reply: Reply) -> float:
        value = value.item() if hasattr(value, "item") and getattr(value, "size", 1) in (1, ()) else value
        if not isinstance(value, Real) or not math.isfinite(value):
            raise UserError(
                f"task.reward={self._name} returned {_short(value)} as {name} for {reply.place}, whose reply is "
                f"{_short(reply.text)}; return a finite number, or a dictionary of them"
            )
        return float(value)


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UserError(
            f"task.reward={name} must be numbers, math, or a function of your own written as module:function"
        )
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
    parameters = inspect.signature(function).parameters.values()
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


def _shown(words: Mapping[str, Any]) -> str:
    """The reply that a call was about, if it asked for it."""
    return _short(words.get("reply", words.get("replies", "not asked for")))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
