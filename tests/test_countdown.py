"""Countdown: its parser, its problems, its splits and its judge."""

from __future__ import annotations

import re
from fractions import Fraction
from random import Random

import made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.model.load import load_tokenizer
from grpo_cli.settings import Sampling
from grpo_cli.tasks.countdown import (
    Countdown,
    CountdownProblem,
    Evaluated,
    NotAnExpression,
    draw_problem,
    evaluate,
    uses_allowed,
)
from grpo_cli.types import Finish, Prompt, Request, Reward, Rollout

TOKENIZER = load_tokenizer(made.model())


def task(seed: int = 0, **changes: int | bool) -> Countdown:
    return made.task("countdown", TOKENIZER, seed, **changes)


def judge(reply: str, problem: str, finish: Finish = Finish.EOS, use_all: bool = True) -> Reward:
    prompt = Prompt("p", (3,), problem)
    ids = TOKENIZER.encode(reply) + ([TOKENIZER.eos_token_id] if finish is Finish.EOS else [])
    rollout = Rollout(Request(prompt, 0, 0, Sampling.plain(128)), tuple(ids), (0.0,) * len(ids), finish, len(ids))
    return task(eval_problems=1, use_all=use_all).reward(prompt, rollout)


def by_python(text: str) -> Fraction:
    """The oracle: Python's own value of the expression (of our own signs), computed in fractions."""
    return eval(re.sub("[0-9]+", r"Fraction(\g<0>)", text), {"Fraction": Fraction})  # noqa: S307


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("25+7*3", 46), ("(25+7)*3", 96), ("10-4-3", 3), ("10-(4-3)", 9), ("24/4/3", 2), ("24/(4/3)", 18)]
    + [("1/3+1/6", Fraction(1, 2)), ("2*(3+(4-1))", 12), ("3-10", -7), ("0*5", 0)],
)
def test_expressions_have_their_exact_value_and_numbers(text: str, value: int | Fraction) -> None:
    numbers = tuple(int(number) for number in re.findall("[0-9]+", text))
    assert evaluate(text) == Evaluated(Fraction(value), numbers)


NO_EXPRESSION = "+ 3+ *3 -3 3++4 (3 3) () (3)(4) 3(4) 007 00 0_1 0x1 1j 3.5 3**4 3//4 1e3 5/0 5/(3-3) 3=3".split()


@pytest.mark.parametrize(
    "text", [*NO_EXPRESSION, "", "3 + 4", "__import__('os')", "1,2", "٣", "1234567", "3<eos>", "3\n"]
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(NotAnExpression):
        evaluate(text)


def test_depth_length_and_number_of_tokens_are_limited() -> None:
    assert evaluate("(" * 16 + "1" + ")" * 16).value == 1
    assert evaluate("+".join(["1"] * 32)).value == 32  # 63 tokens
    for text in ("(" * 17 + "1" + ")" * 17, "+".join(["1"] * 33), "123456+" * 36 + "123456", "(" * 100_000):
        with pytest.raises(NotAnExpression):
            evaluate(text)


@settings(max_examples=100)
@given(
    text=st.recursive(
        st.integers(0, 99).map(str),
        lambda inner: (
            st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join) | inner.map(lambda text: f"({text})")
        ),
        max_leaves=8,
    )
)
def test_an_expression_has_the_value_that_python_computes(text: str) -> None:
    try:
        expected = by_python(text)
    except ZeroDivisionError:
        with pytest.raises(NotAnExpression):
            evaluate(text)
        return
    assert evaluate(text).value == expected


@settings(max_examples=100)
@given(text=st.text(alphabet="0123456789+-*/()", max_size=12))
def test_what_is_read_has_the_value_that_python_computes(text: str) -> None:
    try:
        value = evaluate(text).value
    except NotAnExpression:
        return
    assert value == by_python(text)


@settings(max_examples=100)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 6))
def test_every_problem_comes_with_a_solution_that_the_judge_accepts(seed: int, count: int) -> None:
    problem, solution = draw_problem(Random(seed), count, max_number=20, max_target=99)
    assert len(problem.numbers) == count and 1 <= problem.target <= 99 and problem.target not in problem.numbers
    assert judge(solution, str(problem)).parts == {"correct": 1.0, "well_formed": 1.0, "allowed": 1.0}


def test_numbers_are_used_exactly_once_or_at_most_once_as_the_task_says() -> None:
    assert uses_allowed((3, 3, 5), (5, 3, 3), use_all=True)
    assert not uses_allowed((3, 5), (5, 3, 3), use_all=True)
    assert uses_allowed((3, 5), (5, 3, 3), use_all=False)
    assert not uses_allowed((3, 3, 3), (5, 3, 3), use_all=False)
    assert not uses_allowed((4,), (5, 3, 3), use_all=False)


@pytest.mark.parametrize(
    ("reply", "use_all", "parts"),
    [
        ("25+7*3", True, (1, 1, 1)),
        ("(3*7)+25", True, (1, 1, 1)),
        ("25+7+3", True, (0, 1, 1)),
        ("46", True, (0, 1, 0)),
        ("25+21", True, (0, 1, 0)),
        ("25+7*3=46", True, (0, 0, 0)),
        ("25+7*", True, (0, 0, 0)),
        ("25+<pad>7*3", True, (0, 0, 0)),
        ("25+7", True, (0, 1, 0)),
        ("25+7", False, (0, 1, 1)),
        ("3*7+25-0", False, (0, 1, 0)),
    ],
)
def test_replies_earn_what_they_deserve(reply: str, use_all: bool, parts: tuple[int, int, int]) -> None:
    reward = judge(reply, "3,7,25:46", use_all=use_all)
    assert reward.parts == dict(zip(("correct", "well_formed", "allowed"), map(float, parts), strict=True))
    assert reward.total == parts[0]


def test_a_right_expression_without_an_end_earns_nothing() -> None:
    assert judge("25+7*3", "3,7,25:46", Finish.LENGTH).total == 0.0


def as_problem(prompt: Prompt) -> CountdownProblem:
    numbers, target = TOKENIZER.decode(list(prompt.token_ids)).removesuffix("=").split(":")
    return CountdownProblem(tuple(map(int, numbers.split(","))), int(target))


def test_a_problem_is_the_same_in_every_order_of_its_numbers() -> None:
    one, other, third = (CountdownProblem(*words).key for words in (((3, 1, 2), 9), ((2, 3, 1), 9), ((2, 3, 1), 8)))
    assert one == other != third


def test_every_beginning_of_the_eval_split_has_all_counts_evenly() -> None:
    assert [len(as_problem(prompt).numbers) for prompt in task().prompts("eval")[:6]] == [3, 4, 3, 4, 3, 4]
