"""What counts as the final answer of a text, and when two answers are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.tasks.answers import MAX_ANSWER, MAX_DIGITS, equal, extract_answer, gold_answer

# The ways to write a number are in judge_pairs.txt; these are about where it is looked for.
STRICT = [
    ("He pays 3 * 6 = 18.\n#### 18", "18"),
    ("#### - 7", "-7"),
    ("#### -$5.50", "-11/2"),
    ("#### 18.00.", "18"),
    ("#### 12 (that is, 3 * 4)", "12"),
    ("#### 3 * 4 = 12 dollars", "12"),
    ("#### 5\n\nI hope this helps. There are 7 days in a week.", "5"),
    ("#### 4\nNo, I forgot one.\n#### 5", "5"),
    ("#### 4\nSo \\boxed{5}.", "5"),
    ("\\boxed{4}, that is:\n#### 5", "5"),
    ("<answer>4</answer> or \\boxed{5}.", "5"),
    ("The answer is 3.\n#### 5", "5"),
    ("#### $\\boxed{72}$", "72"),
    ("\\boxed { - 72 }", "-72"),
    ("\\boxed{\\text{She has } \\$18}", "18"),
    ("#### 2 hundred thousand", "200000"),
    ("#### ٤٢", "42"),
    ("#### 1010_2", "10"),
    ("\\boxed{0.1\\overline{6}}", "1/6"),
]
LENIENT = [
    ("THE FINAL ANSWER IS: $5.00!", "5"),
    ("the answer is \\(5\\) because 2 + 3 makes it", "5"),
    ("**Answer:** 5 apples, 2 of them green", "5"),
    ("The answer is 3 + 4, that is 7.", "7"),
    ("The answer is not 5, it is 6.", "6"),
    ("The answer is 5. I hope this answer is clear.", "5"),
    ("Q: How many?\nA: 5 apples", "5"),
    ("A: 5 apples were bought there.\nThen 3 more, so 8.", "8"),
    ("So she has 10 - 4 = 6 eggs left", "6"),
    ("10-5", "5"),
    ("it falls from 3 to -5 degrees", "-5"),
    ("the numbers are 1,2,3", "3"),
    ("There are 5. 3/4 of them", "3/4"),
    ("5 molecules of H2O", "5"),
    ("#### Step 2\nAdd 3 to get 8", "8"),
    ("\\boxed{}: 5", "5"),
    ("The answer is \\boxed{5", "5"),
    ("The area is 25 m².", "25"),
    ("The answer is 5, 2 more than 3.", "5"),
]
NO_ANSWER = [
    "",
    "eighteen",
    "version 3.5.2",
    "H2O",
    "1/0",
    "#### 5:30",
    "#### 5 - 10",
    "#### 1,2",
    "#### 1/2/3",
    "0x1F",
]
NO_ANSWER += ["The answer is 7.\n#### 3 + 4", "7 or \\boxed{5, 6}", "7 or \\boxed{5\\pi}", "9" * (MAX_DIGITS + 1)]
NO_ANSWER += ["#### 1e4000", "9999999^999", "#### 5 or 6", "#### 12_2", "#### 3^{1/2}", "\\boxed{5!}", "\\boxed{5x}"]
NO_ANSWER += ["#### 5 and a half", "0x1F"]
CASES = [*((*case, True) for case in STRICT), *((*case, False) for case in LENIENT)]


@pytest.mark.parametrize(("text", "value", "strict"), CASES)
def test_an_answer_is_strict_in_the_form_asked_for_and_else_lenient(text: str, value: str, strict: bool) -> None:
    found = extract_answer(text)
    assert (found.value, found.strict) == (Fraction(value), strict)


@pytest.mark.parametrize("text", NO_ANSWER)
def test_what_is_no_plain_number_is_no_answer_and_equals_none(text: str) -> None:
    found = extract_answer(text).value
    assert found is None and not equal(found, None) and not equal(found, Fraction(0))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$18.50", "37/2"),
        ("5 apples per day.", "5"),
        ("2 + 3 = <<2+3=5>>5\n#### 5", "5"),
        ("2 + 3 is 5. The answer is 5", "5"),
        ("2 apples and 3 pears", None),
        ("There are 5", None),
        ("7 and \\boxed{5\\pi}", None),
        ("2x = 8", None),
        ("x = 1 or x = 2", None),
        ("3 or 4", None),
        ("5!", None),
    ],
)
def test_a_gold_answer_is_never_guessed_among_several_numbers(text: str, value: str | None) -> None:
    assert gold_answer(text) == (Fraction(value) if value else None)


PAIRS = Path(__file__).with_name("judge_pairs.txt").read_text("utf-8").split("\n# ")[1].splitlines()[1:]


@pytest.mark.parametrize(
    ("form", "strict"),
    [("#### {}", 1), ("\\boxed{{{}}}", 1), ("<answer>{}</answer>", 1), ("A: {}", 0), ("The answer is {}.", 0)],
)
def test_published_formats_of_numbers_are_told_apart_and_recognised(form: str, strict: bool) -> None:
    """An answer that is not marked and no number is passed over for the last number of the text."""
    assert len(PAIRS) >= 100
    for gold, answer, expected in (line.split("\t") for line in PAIRS):
        found = extract_answer(form.format(answer))
        if strict or answer not in ("18x", "x + 1 = 18"):
            same = found.strict == strict and equal(found.value, gold_answer(gold))
            assert ("equal" if same else "different") == expected, (gold, answer, found)


@pytest.mark.parametrize("filling", [" ", "x"])
@pytest.mark.parametrize("length", range(MAX_ANSWER - 9, MAX_ANSWER + 1))
def test_the_end_of_what_is_looked_at_cuts_no_number(filling: str, length: int) -> None:
    assert extract_answer(f"####{filling * length}= 1234 apples").value == 1234


PIECES = ["#### ", "\\boxed{", "}", "{", "\\frac", "answer is ", "A:", "\n", " ", *"- . , / $ = ^ 12 0 x".split()]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_any_text_is_judged_without_an_error_and_shows_what_was_read(text: str) -> None:
    found = extract_answer(text)
    assert found.value is None or any(digit in found.text for digit in "012")


ADVERSARIAL = [
    *r"1 1, 1. , . 1,111 1,1111 - $ 1/ { } ( * # #### \boxed \boxed{ \boxed{1 \boxed{1} \frac{ \frac{1}".split(),
    *r"\frac{1}{ \frac1 \, 1\, 1{,} \text{ \text{a \left( \ answer answer: A: = 1= a1 e1 1e1 x".split(),
    *"- |1 1/|1/1 |9 9| |\n|#### |#### 1|####\n|answer is |answer is $$$$|answer is 1 |\nA:|\nA: 1".split("|"),
    *("1\u202f", "\u2212", "\u0661", "½", "1½", "²", "1 111 ", "1_111_", "1'111'", "1, ", "1^", "1^{1", "1 million "),
    *("$1", "US$", "Rs. ", "1 and ", ".1\\overline{1", "0x", "1e", "A_"),
]


def test_hostile_texts_take_time_in_proportion_to_their_length() -> None:
    # Texts of 100 kB: in linear time all of them take a few seconds, in quadratic time one of them takes minutes. The
    # limit only ends the hang.
    code = (
        "import json, sys\n"
        "from grpo_cli.tasks.answers import extract_answer, gold_answer\n"
        "for piece in json.load(sys.stdin):\n"
        "    text = piece * (100_000 // len(piece))\n"
        "    extract_answer('1' + text + 'a'), gold_answer('answer is ' + text)\n"
    )
    root = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(ADVERSARIAL), text=True, check=True, timeout=300, cwd=root
    )
