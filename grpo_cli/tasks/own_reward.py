"""Your own reward function, `module:function`: called with the arguments that it names, its values checked.

It runs in this process; what a model wrote reaches it as text.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import nan
from typing import Any

from grpo_cli.support.errors import UserError, own_code
from grpo_cli.tasks.judges import Completion, Judge
from grpo_cli.types import LARGEST_REWARD

# What a function may request by the names of its arguments: values of one rollout, or lists of all of a step's.
PER_ROLLOUT = {it: it for it in "reply turns answer question row finished length".split()} | {"answer": "reference"}
PER_STEP = {f"{name}s": PER_ROLLOUT[name] for name in ("answer", "question", "row", "length")}
PER_STEP |= {"replies": "reply", "finished": "finished"}


class OwnReward(Judge):
    """The function as a judge. For one rollout it returns a finite number, or named ones (`{"correct": 1.0, "brief":
    0.2}`); where it takes `replies`, it returns a list of those for all rollouts that are judged together."""

    def __init__(self, name: str, function: Callable[..., Any] | None = None) -> None:
        """Take the function of this name, if none is given."""
        self._name = name
        self._function = own(name, "task.reward") if function is None else function
        self._field_by_argument, self._takes_many = _arguments(name, self._function)

    def __call__(self, completions: Sequence[Completion]) -> list[dict[str, float]]:
        if self._takes_many:
            values = self._of_all(completions) if completions else []
        else:
            fields = self._field_by_argument.items()
            values = [self._called({name: getattr(it, key) for name, key in fields}, it.place) for it in completions]
        return [self._parts(value, completion) for value, completion in zip(values, completions, strict=True)]

    def _called(self, kwargs: Mapping[str, Any], place: str) -> Any:
        reply = kwargs.get("reply", kwargs.get("replies", "not an argument"))
        with own_code(f"task.reward={self._name}", lambda: f" for {place}, whose completion is {_short(reply)}"):
            return self._function(**kwargs)

    def _of_all(self, completions: Sequence[Completion]) -> Sequence[Any]:
        place = f"the {len(completions)} rollouts from {completions[0].place} on"
        kwargs = {name: [getattr(it, key) for it in completions] for name, key in self._field_by_argument.items()}
        values = self._called(kwargs, place)
        with own_code(f"task.reward={self._name}, reading what it returned,"):
            is_list = not isinstance(values, (str, bytes, Mapping)) and hasattr(values, "__len__")
            if is_list and len(values) == len(completions):
                return list(values)
            found = f"{len(values)} rewards" if is_list else _short(values)
            raise UserError(f"task.reward={self._name} returned {found} for {place}: return one for each of `replies`")

    def _parts(self, value: Any, completion: Completion) -> dict[str, float]:
        """Return the named parts; a single number is named after the function."""
        who = f"task.reward={self._name}"
        with own_code(f"{who}, reading what it returned for {completion.place},"):
            parts = value if isinstance(value, Mapping) else {self._name.rpartition(":")[2]: value}
            if not parts:
                raise UserError(f"{who} returned no part for {completion.place}; return at least one")
            for name, part in parts.items():
                if not isinstance(name, str) or not name or "/" in name:
                    raise UserError(f"{who} called a part {_short(name)} for {completion.place}; use text without /")
                as_name = f" as {name}" if parts is value else ""
                if not abs(_real(part)) <= LARGEST_REWARD:
                    raise UserError(
                        f"{who} returned {_short(part)}{as_name} for {completion.place}, whose completion is "
                        f"{_short(completion.reply)}; return a number from -2^53 to 2^53, or a dictionary of such"
                    )
            return {name: _real(part) for name, part in parts.items()}


def own(name: str, key: str) -> Any:
    """Return the function or class of your own that `key` names as module:name."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name or module_name.startswith(".") or module_name.endswith(".py"):
        others = "numbers, math, judge, environment, or " if key == "task.reward" else ""
        raise UserError(f"{key}={name} must be {others}something of your own, written as module:name, without .py")
    with own_code(f"{key}={name}: the module {module_name}"):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        file = getattr(module, "__file__", None) or "built in"
        raise UserError(f"{key}={name}: {module_name} has no function {function_name} ({file})")
    return function


def _arguments(name: str, function: Callable[..., Any]) -> tuple[dict[str, str], bool]:
    """Return its arguments, each with its field of a completion; True if each is a list of a step's."""
    try:
        signature = inspect.signature(function)
        takes_many = any(word in PER_STEP and word not in PER_ROLLOUT for word in signature.parameters)
        known = PER_STEP if takes_many else PER_ROLLOUT
        takes_any = any(it.kind is it.VAR_KEYWORD for it in signature.parameters.values())
        arguments = {word: known[word] for word in (known if takes_any else signature.parameters) if word in known}
        signature.bind(**arguments)
    except (TypeError, ValueError) as error:  # another argument; a function written in C without names
        raise UserError(
            f"task.reward={name}: {error}; by name it can get {', '.join(PER_ROLLOUT)} of one rollout, or lists of "
            f"all: {', '.join(PER_STEP)}"
        ) from error
    return arguments, takes_many


def _real(value: Any) -> float:
    """Return any real scalar as a float: Python's, NumPy's, torch's, Decimal, Fraction; NaN for what is none."""
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # of several elements, complex, too large
        value = value.item() if hasattr(value, "item") else value
        return nan if isinstance(value, (str, bytes, bytearray, memoryview)) else float(value)
    return nan


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # a whole number with more digits than Python writes, or an object of your own
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
