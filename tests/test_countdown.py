"""Countdown: its parser, its problems, its splits and its judge."""

from __future__ import annotations

import ast
from fractions import Fraction
from random import Random

import made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.model.load import load_tokenizer
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.countdown import Countdown, CountdownProblem, NotAnExpression, draw_problem, evaluate, uses_allowed
from grpo_cli.tasks.generated import is_held_out
from grpo_cli.types import Finish, Prompt, Request, Reward, Rollout

TOKENIZER = load_tokenizer(made.model())


def task(seed: int = 0, **changes: int | bool) -> Countdown:
    return made.task("countdown", TOKENIZER, seed, **changes)


def judge(reply: str, problem: str, finish: Finish = Finish.EOS, use_all: bool = True) -> Reward:
    prompt = Prompt("p", (3,), problem)
    ids = TOKENIZER.encode(reply) + ([TOKENIZER.eos_token_id] if finish is Finish.EOS else [])
    rollout = Rollout(Request(prompt, 0, 0, Sampling.plain(128)), tuple(ids), (0.0,) * len(ids), finish, len(ids))
    return task(eval_problems=1, use_all=use_all).reward(prompt, rollout)


def by_ast(text: str) -> Fraction:
    """The oracle: Python's own reading of the expression, computed in fractions."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        assert isinstance(node, ast.BinOp)
        a, b = value(node.left), value(node.right)
        if isinstance(node.op, ast.Add):
            return a + b
        if isinstance(node.op, ast.Sub):
            return a - b
        return a * b if isinstance(node.op, ast.Mult) else a / b

    return value(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("25+7*3", 46), ("(25+7)*3", 96), ("10-4-3", 3), ("10-(4-3)", 9), ("24/4/3", 2), ("24/(4/3)", 18)]
    + [("1/3+1/6", Fraction(1, 2)), ("2*(3+(4-1))", 12), ("3-10", -7), ("0*5", 0)],
)
def test_expressions_have_their_exact_value(text: str, value: int | Fraction) -> None:
    assert evaluate(text).value == value


def test_the_numbers_of_an_expression_are_listed_in_order() -> None:
    assert evaluate("25+7*(3-7)").numbers == (25, 7, 3, 7)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "+",
        "3+",
        "*3",
        "-3",
        "3 + 4",
        "3++4",
        "(3",
        "3)",
        "()",
        "(3)(4)",
        "3(4)",
        "007",
        "3.5",
        "3**4",
        "3//4",
        "1e3",
    ]
    + ["5/0", "5/(3-3)", "__import__('os')", "1,2", "٣", "3=3", "1234567", "3<eos>", "3\n"],
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
def test_the_parser_agrees_with_pythons(text: str) -> None:
    try:
        expected = by_ast(text)
    except ZeroDivisionError:
        with pytest.raises(NotAnExpression):
            evaluate(text)
        return
    assert evaluate(text).value == expected


@settings(max_examples=100)
@given(text=st.text(alphabet="0123456789+-*/()", max_size=12))
def test_what_the_parser_reads_python_reads_too(text: str) -> None:
    try:
        value = evaluate(text).value
    except NotAnExpression:
        return
    assert value == by_ast(text)


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
    ],
)
def test_replies_earn_what_they_deserve(reply: str, use_all: bool, parts: tuple[int, int, int]) -> None:
    reward = judge(reply, "3,7,25:46", use_all=use_all)
    assert reward.parts == dict(zip(("correct", "well_formed", "allowed"), map(float, parts), strict=True))
    assert reward.total == parts[0]


def test_a_right_expression_without_an_end_earns_nothing() -> None:
    assert judge("25+7*3", "3,7,25:46", Finish.LENGTH).total == 0.0


def test_some_of_the_numbers_are_enough_when_the_task_says_so() -> None:
    assert judge("25+7*3", "3,7,25,9:46", use_all=False).total == 1.0
    assert judge("25+7*3", "3,7,25,9:46", use_all=True).total == 0.0


def test_the_splits_share_no_problem_in_any_order_of_its_numbers() -> None:
    train, held_out = task(1).prompts("train")[0:1000], task(1).prompts("eval")
    keys = [as_problem(prompt).key for prompt in held_out]
    assert len(set(keys)) == len(keys) == 256
    assert all(is_held_out(key) for key in keys)
    assert not any(is_held_out(as_problem(prompt).key) for prompt in train)
    assert (
        CountdownProblem((3, 1, 2), 9).key == CountdownProblem((2, 3, 1), 9).key != CountdownProblem((2, 3, 1), 8).key
    )


def as_problem(prompt: Prompt) -> CountdownProblem:
    numbers, target = TOKENIZER.decode(list(prompt.token_ids)).removesuffix("=").split(":")
    return CountdownProblem(tuple(map(int, numbers.split(","))), int(target))


def test_problems_are_a_function_of_seed_and_index() -> None:
    first, again, other = task(3).prompts("train"), task(3).prompts("train"), task(4).prompts("train")
    assert [first[i] for i in (7, 2, 5)] == [again[i] for i in (7, 2, 5)]
    assert first[0:20] != other[0:20]
    assert task(3).prompts("eval") == task(4).prompts("eval")
    assert str(as_problem(first[0])) == first[0].answer


def test_every_beginning_of_the_eval_split_has_all_counts_evenly() -> None:
    assert [len(as_problem(prompt).numbers) for prompt in task().prompts("eval")[:6]] == [3, 4, 3, 4, 3, 4]


def test_settings_that_cannot_work_are_all_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        task(min_numbers=1, max_target=5, eval_problems=0)
    message = str(caught.value)
    assert "task.min_numbers=1" in message and "task.max_target=5" in message and "task.eval_problems=0" in message


def test_more_held_out_problems_than_there_are_is_an_error_that_says_so() -> None:
    with pytest.raises(UserError, match="task.eval_problems=200.*distinct held-out problems"):
        task(min_numbers=2, max_numbers=2, max_number=5, max_target=10, eval_problems=200)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(UserError, match="'test'"):
        task().prompts("test")
