"""What counts as the final answer of a text, and when two answers are the same; nothing can hang or fool the judge."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import patient
from made import rollout_of
from tiny_hf import make_tokenizer

from grpo_cli.support.errors import UserError
from grpo_cli.tasks.answers import MAX_ANSWER, MAX_DIGITS, final_answer, final_number, reference_number
from grpo_cli.tasks.judges import Completion
from grpo_cli.tasks.math_judge import MathJudge, compare_written
from grpo_cli.tasks.problems import Problem
from grpo_cli.tasks.workers import Worker

# The ways to write a number are in judge_pairs.txt; these are about where it is looked for.
MARKED = [
    ("He pays 3 * 6 = 18.\n#### 18", "18"),
    ("#### 12 (that is, 3 * 4)", "12"),
    ("#### 3 * 4 = 12 dollars", "12"),
    ("#### 5\n\n#### Explanation\nThere are 7 days in a week.", "5"),
    ("\\boxed{4}, that is:\n#### 5", "5"),
    ("<answer>4</answer> or \\boxed{5}.", "5"),
    ("<answer>\n8 + 4 = 12\n</answer> 7", "12"),
    ("#### $\\boxed{72}$", "72"),
    *((f"#### {it}", "12") for it in ("3 x 4 = 12", "20 minutes - 8 minutes = 12 minutes", "20% of 60 = 12", "₱12")),
    ("\\boxed{12}\n#### Let's verify\n3 * 5 = 15", "12"),
    *((f"\\boxed{{{it}}}", "12") for it in ("f(3) = 12", "12\\text{ kg of CO}_2")),
    ("\\boxed { - 72 }", "-72"),
    ("\\boxed{\\text{She has } \\$18}", "18"),
    ("#### ٤٢", "42"),
    ("#### 1010_2", "10"),
    ("\\boxed{0.1\\overline{6}}", "1/6"),
]
LENIENT = [
    ("THE FINAL ANSWER IS: $5.00!", "5"),
    ("the answer is \\(5\\) because 2 + 3 makes it", "5"),
    ("**Answer:** 5 apples, 2 of them green", "5"),
    ("The answer is 3 + 4, that is 7.", "7"),
    ("The answer is 5, of 8. I hope this answer is clear.", "5"),
    ("the answer is:\n\n5 of the 8", "5"),
    ("<answer>She has 18</answer>", "18"),
    ("A: 5 apples were bought there.\nThen 3 more, so 8.", "8"),
    ("So she has 10 - 4 = 6 eggs left", "6"),
    ("it falls from 3 to -5 degrees", "-5"),
    ("the numbers are 1,2,3", "3"),
    *((it, "12") for it in ("It emits 12 kg of CO₂.", "12 m s⁻¹", "3 hours * $4 = $12.")),
    *((f"<answer>{it} 12</answer>", "12") for it in ("Janet's total is", "A total of", "FINAL ANSWER:")),
    ("There are 5. 3/4 of them", "3/4"),
    ("#### Step 2\nAdd 3 to get 8", "8"),
    ("\\boxed{}: 5", "5"),
    ("The answer is \\boxed{5", "5"),
]
NO_ANSWER = ["", "eighteen", "version 3.5.2", "H2O", "1/0", "0x1F", "The answer is 7.\n#### 3 + 4", "9999999^999"]
NO_ANSWER += ["7 or \\boxed{5, 6}", "7 or \\boxed{5\\pi}", "9" * (MAX_DIGITS + 1), "\\boxed{5!}", "\\boxed{5x}"]
NO_ANSWER += ["#### 5:30", "#### 5 - 10", "#### 1,2", "#### 1/2/3", "#### 1e4000", "#### 5 or 6", "#### 12_2"]
NO_ANSWER += ["#### 3^{1/2}", "#### 5 and a half", "<answer>12:00</answer>", "7 or <answer>18 or 19</answer>"]


@pytest.mark.parametrize(("text", "value", "marked"), [*((*x, True) for x in MARKED), *((*x, False) for x in LENIENT)])
def test_a_number_is_marked_or_stated_or_last(text: str, value: str, marked: bool) -> None:
    assert final_number(text) == (Fraction(value), marked)


@pytest.mark.parametrize("text", NO_ANSWER)
def test_what_is_no_plain_number_is_no_answer(text: str) -> None:
    assert final_number(text)[0] is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$18.50", "37/2"),
        ("5 apples per day.", "5"),
        ("2 + 3 = <<2+3=5>>5\n#### 5", "5"),
        ("2 + 3 is 5. The answer is 5", "5"),
        *((text, None) for text in ("2 apples and 3 pears", "There are 5", "7 and \\boxed{5\\pi}", "2x = 8", "3 or 4")),
        *((text, None) for text in ("x = 1 or x = 2", "5!")),
    ],
)
def test_a_gold_answer_is_never_guessed_among_several_numbers(text: str, value: str | None) -> None:
    assert reference_number(text) == (Fraction(value) if value else None)


LINES = Path(__file__).with_name("judge_pairs.txt").read_text("utf-8").splitlines()
PAIRS = [line.split("\t") for line in LINES if not line.startswith("#")]
NUMBERS = PAIRS[: [line.startswith("#") for line in LINES].index(True, 2) - 2]


@pytest.mark.parametrize(
    ("form", "marked"), [("#### {}", 1), ("\\boxed{{{}}}", 1), ("<answer>{}</answer>", 1), ("The answer is {}.", 0)]
)
def test_published_formats_of_numbers_are_told_apart_and_recognised(form: str, marked: bool) -> None:
    """An answer that is not marked and no number is passed over for the last number of the text."""
    assert len(NUMBERS) >= 100
    for reference, answer, expected in NUMBERS:
        if marked or answer not in ("18x", "x + 1 = 18"):
            found = final_number(form.format(answer))
            same = found == (reference_number(reference), marked)
            assert ("equal" if same else "different") == expected, (reference, answer, found)


EXPRESSIONS = [
    (r"So \boxed{3} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}", True),
    (r"\boxed{\text{no } \{x \mid x > 0\}}", r"\text{no } \{x \mid x > 0\}", True),
    (r"\boxed 7", "7", True),
    (r"\fbox{x}", "x", True),
    (r"<answer>\boxed{5}</answer>", "5", True),
    (r"\boxed{4} but <answer> x^2 </answer>", "x^2", True),
    ("1 + 1\n#### x + 1\nbye", "x + 1", True),
    (r"The answer is $\frac{3}{4}$, I think.", r"\frac{3}{4}", False),
    ("So the answer is 4.5. Good.", "4.5", False),
    ("**Answer:** **12**", "12", False),
    ("She has $3 and earns 3 * $4=$12. So $15", "$15", False),
    (r"Hence $a=b$ and \(c = 3\) done", "c = 3", False),
    ("It is 7.", "7", False),
    (r"\boxed{x^2 never closed, so 8", "8", False),
    (rf"\boxed{{{'1' * (MAX_ANSWER + 1)}}}, the answer is 9", "9", False),
    *((text, None, None) for text in (r"\boxed{}", "no idea", "")),
]


@pytest.mark.parametrize(("text", "expression", "marked"), EXPRESSIONS)
def test_an_expression_is_marked_or_stated_or_last(text: str, expression: str, marked: bool) -> None:
    found = final_answer(text)
    assert (found and found.text, found and bool(found.mark)) == (expression, marked)


def test_writing_alone_settles_most_comparisons_and_none_wrongly() -> None:
    """Of two answers either way round; a fifth of the pairs or so is left to algebra."""
    found = [(one, other, expected, compare_written(one, other)) for one, other, expected in PAIRS]
    found += [(other, one, expected, compare_written(other, one)) for one, other, expected in PAIRS]
    assert [one for one in found if one[2:] == ("different", True)] == []
    assert len([one for one in found if one[2:] == ("equal", False)]) <= 2
    assert sum(isinstance(one[3], bool) for one in found) > 0.6 * len(found)


def test_the_end_of_what_is_looked_at_cuts_no_number() -> None:
    for length in range(MAX_ANSWER - 9, MAX_ANSWER + 1):
        assert final_number(f"####{' ' * length}= 1234 apples")[0] == 1234


PIECES = ["#### ", "\\boxed{", "<answer>", "}", "{", "\\frac", "sqrt", "answer is ", "\n", " "]
HANGS = (r"5^{5^{5^{5^5}}}", r"(10^9)!")


@settings(max_examples=300)
@given(st.lists(st.sampled_from([*PIECES, *"- . , / $ = ^ 12 0 x & _ % ( ) [ ]".split()]), max_size=20).map("".join))
def test_any_text_is_judged_without_an_error(text: str) -> None:
    final_number(text)
    found = final_answer(text)
    assert found is None or 0 < len(found.text) <= MAX_ANSWER
    assert compare_written(text, text) in (True, False)


@pytest.fixture(scope="module")
def judge() -> Iterator[MathJudge]:
    pytest.importorskip("math_verify")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "ask", patient(lambda question: question["answer"] in HANGS))
        yield MathJudge("correct", 4.0, 2)


def judged(judge: MathJudge, *pairs: tuple[str, str]) -> list[dict[str, float]]:
    problem = Problem(1, "line 1", "q", "")
    return judge([Completion("it", [rf"\boxed{{{answer}}}"], right, True, 1, problem) for right, answer in pairs])


def test_published_formats_of_answers_are_told_apart_and_recognised(judge: MathJudge) -> None:
    assert len({(reference, answer) for reference, answer, _ in PAIRS}) == len(PAIRS) >= 300
    parts = judged(judge, *((reference, answer) for reference, answer, _ in PAIRS))
    found = [(*pair, "equal" if it["correct"] else "different") for pair, it in zip(PAIRS, parts, strict=True)]
    assert [it for it in found if it[2:] == ("different", "equal")] == []
    missed = [it for it in found if it[2:] == ("equal", "different")]
    assert len(missed) <= len(PAIRS) / 100, missed


def test_who_hangs_is_a_counted_zero_within_the_limit_and_asked_once(judge: MathJudge) -> None:
    pairs = [("2x", text) for text in (HANGS[0], "x+x", HANGS[1], "3x")] * 3
    parts = judged(judge, *pairs)
    assert [p["over_limit"] for p in parts] == [1.0, 0.0, 1.0, 0.0] * 3
    assert [p["correct"] for p in parts] == [0.0, 1.0, 0.0, 0.0] * 3
    for worker in judge._workers._workers:
        worker.end()
    assert judged(judge, *pairs) == parts  # remembered: no worker is started
    assert not any(worker._process for worker in judge._workers._workers)


def test_what_only_looks_like_code_is_not_run(judge: MathJudge, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    call = f"__import__('os').system('touch {proof}')"
    replies = judge._workers.ask([{"reference": "5", "answer": text} for text in (call, rf"\text{{{call}}}")])
    assert len(replies) == 2 and not any(reply.get("equal") for reply in replies) and not proof.exists()


def test_a_comparison_that_fails_counts_a_zero_and_the_others_are_judged(
    judge: MathJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"y": {"equal": True}, "z": {"died": "exit code 3"}, "w": {"incomparable": "KeyError"}}
    monkeypatch.setattr(judge._workers, "ask", lambda questions: [found[one["answer"]] for one in questions])
    parts = judged(judge, *(("a", text) for text in found))
    assert [(p["correct"], p["incomparable"]) for p in parts] == [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0)]


def test_answers_are_the_last_boxes_of_solutions_or_short_texts(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    tokenizer = make_tokenizer()
    solutions = (r"First \boxed{1}, so \boxed{\frac{1}{2}}.", "2x", "1 + 1\n#### 2")
    rows = [{"problem": f"problem {i}", "solution": text} for i, text in enumerate(solutions)]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = made.task("math", tokenizer, path=str(tmp_path / "m.jsonl"), eval_fraction=1.0)
    prompts = list(task.prompts("eval"))
    assert [prompt.answer for prompt in prompts] == [r"\frac{1}{2}", "2x", "2"]
    rewards = task.rewards([(prompt, rollout_of(prompt, r"\boxed{0.5}", tokenizer)) for prompt in prompts[:2]])
    assert [reward.total for reward in rewards] == [1.0, 0.0]
    assert set(rewards[0].parts) == {"correct", "correct_strict", "over_limit", "incomparable"}
    with pytest.raises(UserError, match="lower task.eval_fraction"):
        task.prompts("train")


ADVERSARIAL = [
    *r"1 1, 1. , . 1,111 1,1111 - $ 1/ { } ( * # #### \boxed \boxed{ \boxed{1 \boxed{1} \frac{ \frac{1}".split(),
    *r"\frac{1}{ \frac1 \, 1\, 1{,} \text{ \text{a \left( \ answer answer: <answer> = 1= a1 e1 1e1 x".split(),
    *"- |1 1/|1/1 |9 9| |\n|#### |#### 1|####\n|answer is |answer is $$$$|answer is 1 ".split("|"),
    *("1\u202f", "\u2212", "\u0661", "½", "1½", "²", "1 111 ", "1_111_", "1'111'", "1, ", "1^", "1^{1", "1 million "),
    *("$1", "US$", "Rs. ", "1 and ", ".1\\overline{1", "0x", "1e", "A_"),
]


def test_hostile_texts_take_time_in_proportion_to_their_length() -> None:
    # Texts of 100 kB: in linear time all of them take a few seconds, in quadratic time one of them takes minutes. The
    # limit only ends the hang.
    code = (
        "import json, sys\n"
        "from grpo_cli.tasks.answers import final_answer, final_number, reference_number\n"
        "for piece in json.load(sys.stdin):\n"
        "    text = piece * (100_000 // len(piece))\n"
        "    final_answer(text), final_number('1' + text + 'a'), reference_number('answer is ' + text)\n"
    )
    texts, root = json.dumps(ADVERSARIAL), Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], input=texts, text=True, check=True, timeout=300, cwd=root)
