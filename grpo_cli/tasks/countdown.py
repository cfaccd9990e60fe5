"""Countdown: reach the target with the given numbers and + - * /. A prompt is `3,7,25:46=`, a completion is `25+7*3`.

A completion within the limits is parsed by `ast`, and only numbers and the four operations are computed, in exact
fractions. It is never handed to `eval`, and what is no expression earns nothing.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from random import Random
from typing import Annotated

from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import Range
from grpo_cli.tasks.generated import EvalProblems, GeneratedTask, TrainProblems
from grpo_cli.tasks.prompting import Tokenizer, Verbatim
from grpo_cli.types import Prompt, Reward, Rollout

MAX_CHARACTERS = 256
MAX_TOKENS = 64
MAX_DEPTH = 16
MAX_DIGITS = 6

_TOKEN = re.compile(rf"(?:0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})(?![0-9])|[-+*/()]")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class NotAnExpression(ValueError):
    """The text is no expression within the limits, or divides by zero."""


@dataclass(frozen=True)
class Evaluated:
    """An expression's exact value and every number it names, in order."""

    value: Fraction
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class CountdownProblem:
    """Numbers in the order they are shown, and the target."""

    numbers: tuple[int, ...]
    target: int

    def __str__(self) -> str:
        return f"{','.join(map(str, self.numbers))}:{self.target}"

    @property
    def key(self) -> str:
        """The same for all orders of the numbers, so that no split sees another's problem rearranged."""
        return str(CountdownProblem(tuple(sorted(self.numbers)), self.target))


def evaluate(text: str) -> Evaluated:
    """Compute an expression of plain numbers, + - * / and parentheses, with the usual precedence, left to right.

    At most 256 characters, 64 tokens, 16 nested parentheses and 6 digits a number. Raises NotAnExpression.

    >>> evaluate("(25-3)/4").value
    Fraction(11, 2)
    """
    if len(text) > MAX_CHARACTERS:
        raise NotAnExpression(f"{len(text)} characters")
    tokens = _TOKEN.findall(text)
    depth = max(accumulate((token == "(") - (token == ")") for token in tokens), default=0)
    if "".join(tokens) != text or len(tokens) > MAX_TOKENS or depth > MAX_DEPTH:
        raise NotAnExpression(f"{text!r} is beyond the limits, or has other signs in it")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise NotAnExpression(str(error)) from error
    return Evaluated(value, tuple(int(token) for token in tokens if token.isdigit()))


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left, op, right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
    raise NotAnExpression(f"{type(node).__name__} is no part of an expression")


def uses_allowed(used: Sequence[int], given: Sequence[int], use_all: bool) -> bool:
    """Whether each given number is used once (`use_all`) or at most once; a number given twice may be used twice."""
    counts, allowed = Counter(used), Counter(given)
    return counts == allowed if use_all else counts <= allowed


def draw_problem(rng: Random, count: int, max_number: int, max_target: int) -> tuple[CountdownProblem, str]:
    """A problem and one of its solutions, which uses every number once and whose results are all positive integers."""
    while True:
        numbers = tuple(rng.randint(1, max_number) for _ in range(count))
        target, solution = _combine(rng, numbers)
        if target <= max_target and target not in numbers:
            return CountdownProblem(numbers, target), solution


def _combine(rng: Random, numbers: Sequence[int]) -> tuple[int, str]:
    """Join random pairs by random operations until one positive integer is left, and write down how."""
    left = [(number, str(number), 3) for number in numbers]  # value, text, and how tightly the text binds
    while len(left) > 1:
        rng.shuffle(left)
        (a, a_text, a_binds), (b, b_text, b_binds) = sorted((left.pop(), left.pop()), reverse=True)
        signs = ["+", "*"] + ["-"] * (a > b) + ["/"] * (a % b == 0)
        sign = rng.choice(signs)
        binds = 2 if sign in "*/" else 1
        a_text = a_text if a_binds >= binds else f"({a_text})"
        b_text = b_text if b_binds > binds or (b_binds == binds and sign in "+*") else f"({b_text})"
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
        left.append((value, f"{a_text}{sign}{b_text}", binds))
    return left[0][0], left[0][1]


class Countdown(GeneratedTask[CountdownProblem]):
    """The task. Every problem can be solved with all of its numbers, and is in one split only in whatever order they
    come.

    The reward is 1 for a completion that ended by itself, names the given numbers as allowed (`use_all`: each exactly
    once, else each at most once) and equals the target, else 0.
    """

    name, sizes_are, makes_more = "countdown", "numbers", "max_number"

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        min_numbers: Annotated[int, Range(2, 8)],
        max_numbers: Annotated[int, Range(2, 8)],
        max_number: Annotated[int, Range(2, 999)],
        max_target: Annotated[int, Range(2, 9999)],
        use_all: bool,
        train_problems: TrainProblems,
        eval_problems: EvalProblems,
    ) -> None:
        if max_target < max_number:
            raise UserError(f"task.max_target={max_target} must be at least task.max_number={max_number}")
        self._verbatim = Verbatim(tokenizer)
        self._max_number, self._max_target, self._use_all = max_number, max_target, use_all
        super().__init__(self._verbatim, seed, min_numbers, max_numbers, train_problems, eval_problems)

    def draw(self, rng: Random, size: int) -> CountdownProblem:
        return draw_problem(rng, size, self._max_number, self._max_target)[0]

    def key(self, problem: CountdownProblem) -> str:
        return problem.key

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        completion = self._verbatim.completion(rollout)
        try:
            found = evaluate(completion) if completion is not None else None
        except NotAnExpression:
            found = None
        numbers, target = prompt.answer.split(":")
        given = [int(number) for number in numbers.split(",")]
        allowed = found is not None and uses_allowed(found.numbers, given, self._use_all)
        correct = float(found is not None and allowed and found.value == int(target))
        parts = {"correct": correct, "well_formed": float(found is not None), "allowed": float(allowed)}
        return Reward(correct, parts, weights={"correct": 1.0})
