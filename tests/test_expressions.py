"""Answers that are expressions: where they are found in a text, and when their writing alone settles a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.tasks.expressions import MAX_EXPRESSION, compare_written, final_expression

FOUND = [
    (r"So \boxed{3} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}", True),
    (r"\boxed{\text{no } \{x \mid x > 0\}}", r"\text{no } \{x \mid x > 0\}", True),
    (r"\boxed 7", "7", True),
    (r"\fbox{x}", "x", True),
    ("<answer>5 apples</answer>", "5 apples", True),
    (r"<answer>\boxed{5}</answer>", "5", True),
    (r"\boxed{4} but <answer> $x^2$ </answer>", "x^2", True),
    ("1 + 1\n#### x + 1\nbye", "x + 1", True),
    (r"#### 3 and \boxed{4}", "4", True),
    (r"The answer is $\frac{3}{4}$, I think.", r"\frac{3}{4}", False),
    ("So the answer is 4.5. Good.", "4.5", False),
    ("**Answer:** **12**", "12", False),
    ("The final answer is: 72", "72", False),
    ("She has $3 and earns 3 * $4=$12. So $15", "$15", False),
    (r"Hence $a=b$ and \(c = 3\) done", "c = 3", False),
    ("It is 7.", "7", False),
    (r"\boxed{x^2 never closed, so 8", "8", False),
    (rf"\boxed{{{'1' * (MAX_EXPRESSION + 1)}}}, the answer is 9", "9", False),
    (r"\boxed{}", None, None),
    ("no idea", None, None),
    ("", None, None),
]


@pytest.mark.parametrize(("text", "expression", "marked"), FOUND)
def test_the_final_expression_is_marked_or_stated_or_last(text: str, expression: str, marked: bool) -> None:
    found = final_expression(text)
    assert (found and found.expression, found and found.marked) == (expression, marked)


PAIRS = Path(__file__).with_name("judge_pairs.txt").read_text("utf-8").splitlines()


def test_writing_alone_settles_most_comparisons_and_none_wrongly() -> None:
    """Of two answers either way round; a fifth of the pairs or so is left to algebra."""
    pairs = [line.split("\t") for line in PAIRS if not line.startswith("#")]
    found = [(gold, answer, expected, compare_written(gold, answer)) for gold, answer, expected in pairs]
    found += [(answer, gold, expected, compare_written(answer, gold)) for gold, answer, expected in pairs]
    assert [one for one in found if one[2:] == ("different", True)] == []
    assert len([one for one in found if one[2:] == ("equal", False)]) <= 2
    assert sum(isinstance(one[3], bool) for one in found) > 0.6 * len(found)


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_is_its_own_in_each_writing(value: object) -> None:
    upper, _, lower = str(value).partition("/")
    forms = [f"{upper}/{lower or 1}", rf"\frac{{{upper}}}{{{lower or 1}}}", rf"x = \tfrac {{{upper}}}{{{lower or 1}}}."]
    assert all(compare_written(str(value), form) for form in forms)


@given(st.text(alphabet=r"\frac{}sqrt12x$^_&%,.()[]=- #<answer>/boxed", max_size=200))
def test_no_text_is_too_odd_to_be_read(text: str) -> None:
    found = final_expression(text)
    assert found is None or 0 < len(found.expression) <= MAX_EXPRESSION
    assert compare_written(text, text) in (True, False)
