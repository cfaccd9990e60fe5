"""Answers that are expressions: where they are found in a text, and when their writing alone settles a comparison."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.tasks.expressions import MAX_EXPRESSION, final_expression, read, settled

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


SAME = [
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac12", "1/2"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"x = 5", "5"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    (r"5\text{ cm}^2", "5"),
    (r"12\,\text{cm}", "12"),
    (r"\text{Monday}", "Monday"),
    ("1,234", "1{,}234"),
    (r"\$18.90", "18.9"),
    (r"50\%", "50"),
    (r"90^\circ", "90^{\\circ}"),
    (r"90°", "90"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"3\sqrt2", r"3 \sqrt2"),
    ("\u22123", "-3"),
    ("007", "7"),
    (".5", "0.50"),
]
DIFFERENT = [
    ("5", "6"),
    (r"\frac{1}{3}", "0.333333"),  # exact
    ("1/0", "5"),  # no number, so not settled: None
    ("-3", "3"),
    ("1,2", "12"),
    ("5x", "5"),
    ("3 4", "34"),
    (r"1\quad 2", "12"),
    ("1 1/2", "11/2"),
    (r"5\text{ p.m.}", r"5\text{ a.m.}"),
    ("no", "on"),
    ("12:00", "1:00"),
    ("x=5", "y=5"),
    ("2^{10}", "210"),
    ("(1,2)", "(1,2]"),
    ("1101_2", "1101"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_what_differs_in_layout_alone_is_the_same(gold: str, answer: str) -> None:
    assert settled(gold, answer) is True and settled(answer, gold) is True


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_what_differs_in_more_is_never_called_the_same(gold: str, answer: str) -> None:
    assert settled(gold, answer) is not True and settled(answer, gold) is not True


def test_only_two_plain_numbers_are_called_different_without_asking() -> None:
    assert settled("5", "6") is False
    assert settled("2x", "x + x") == ("2x", "x+x") and settled("5", "2 + 3") == (r"\frac{5}{1}", "2+3")
    assert settled("", "") is False


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_is_its_own_in_each_writing(value: object) -> None:
    upper, _, lower = str(value).partition("/")
    forms = [f"{upper}/{lower or 1}", rf"\frac{{{upper}}}{{{lower or 1}}}", rf"x = \tfrac {{{upper}}}{{{lower or 1}}}."]
    assert all(settled(str(value), form) for form in forms)


@given(st.text(alphabet=r"\frac{}sqrt12x$^_&%,.()[]=- #<answer>/boxed", max_size=200))
def test_no_text_is_too_odd_to_be_read(text: str) -> None:
    found = final_expression(text)
    assert found is None or 0 < len(found.expression) <= MAX_EXPRESSION
    assert settled(text, text) in (True, False)


HOSTILE = ["\\boxed{", "\\(", "$", "<answer>", "\\frac", "answer is ", "\\text{", "#### ", "{", "="]


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_texts_of_any_length_are_read(piece: str) -> None:
    """At once in linear time; in quadratic time one of them takes minutes."""
    final_expression(piece * 100_000)
    read((piece * 100)[:MAX_EXPRESSION])
