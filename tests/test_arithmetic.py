"""The embedded task: its problems, its splits and its judge."""

from __future__ import annotations

from random import Random

import made
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from grpo_cli.model.load import load_tokenizer
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.arithmetic import (
    Arithmetic,
    Sum,
    draw_sum,
    final_answer,
    is_well_formed,
    worked_solution,
)
from grpo_cli.tasks.generated import is_held_out
from grpo_cli.types import Finish, Prompt, Request, Reward, Rollout

TOKENIZER = load_tokenizer(made.model())


def task(seed: int = 0, **changes: int) -> Arithmetic:
    return made.task("arithmetic", TOKENIZER, seed, **changes)


def judge(reply: str, answer: str, finish: Finish = Finish.EOS) -> Reward:
    prompt = Prompt("p", (3,), answer)
    ids = TOKENIZER.encode(reply) + ([TOKENIZER.eos_token_id] if finish is Finish.EOS else [])
    rollout = Rollout(Request(prompt, 0, 0, Sampling.plain(128)), tuple(ids), (0.0,) * len(ids), finish, len(ids))
    return task(eval_problems=1).reward(prompt, rollout)


def number_of_terms(prompt: Prompt) -> int:
    text = TOKENIZER.decode(list(prompt.token_ids))
    return 1 + text.count("+") + text.count("-")


def test_a_worked_solution_does_the_operations_from_left_to_right() -> None:
    problem = Sum((12, 7, -5, 30))
    assert str(problem) == "12+7-5+30"
    assert worked_solution(problem) == "19-5+30=14+30=44"
    assert worked_solution(problem, (2, 1)) == "14+30=44"
    assert worked_solution(problem, (3,)) == "44"
    assert worked_solution(Sum((3, -3, 4))) == "0+4=4"
    with pytest.raises(ValueError, match="undone"):
        worked_solution(problem, (1, 1))


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), num_terms=st.integers(2, 8))
def test_running_results_and_operands_stay_within_their_bounds(seed: int, num_terms: int) -> None:
    terms = draw_sum(Random(seed), num_terms, max_operand=9, max_value=99).terms
    assert len(terms) == num_terms
    assert all(1 <= abs(term) <= 9 for term in terms[1:])
    assert all(0 <= sum(terms[: i + 1]) <= 99 for i in range(num_terms))


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), num_terms=st.integers(2, 8))
def test_every_worked_solution_is_judged_right_and_another_number_is_not(seed: int, num_terms: int) -> None:
    problem = draw_sum(Random(seed), num_terms, max_operand=9, max_value=99)
    reply, answer = worked_solution(problem), sum(problem.terms)
    assert judge(reply, str(answer)).parts == {"correct": 1.0, "well_formed": 1.0}
    assert judge(reply, str(answer + 1)).total == 0.0


@pytest.mark.parametrize("reply", ["44", "14+30=44", "99=44", "+=44"])
def test_only_the_last_number_decides(reply: str) -> None:
    assert judge(reply, "44").total == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "=",
        "44=",
        "044",
        "+44",
        "-44",
        "4 4",
        "4<pad>4",
        "<eos>44",
        "44+0",
        "(44)",
        "44,",
        "14+30",
        "144",
        "4",
        "é44",
    ],
)
def test_anything_but_the_plain_number_earns_nothing(reply: str) -> None:
    assert judge(reply, "44").total == 0.0


def test_a_right_number_without_an_end_earns_nothing() -> None:
    parts = {"correct": 0.0, "well_formed": 0.0}
    assert judge("14+30=44", "44", Finish.LENGTH) == Reward(0.0, parts, weights={"correct": 1.0})


@pytest.mark.parametrize(
    ("reply", "well_formed"),
    [("44", True), ("14+30=44", True), ("44=44", True), ("0+4=4", True), ("14++30=44", False), ("=44", False)]
    + [("14+30", False), ("01+4=5", False), ("14*3=42", False), ("14+0=14", False), ("1" * 9, False)],
)
def test_well_formed_means_lines_of_sums_that_end_in_a_number(reply: str, well_formed: bool) -> None:
    assert is_well_formed(reply) is well_formed


def test_the_final_answer_is_a_plain_number_or_nothing() -> None:
    assert final_answer("14+30=44") == "44"
    assert final_answer("0") == "0"
    assert [final_answer(reply) for reply in ("044", "4=4=", "-4", "12345", "44\n", "٤")] == [None] * 6


def test_a_reply_as_long_as_a_book_is_judged_at_once() -> None:
    assert final_answer("1+" * 100_000 + "=" * 100_000) is None
    assert not is_well_formed("1+" * 100_000)


def test_problems_are_a_function_of_seed_and_index() -> None:
    first, again, other = task(3).prompts("train"), task(3).prompts("train"), task(4).prompts("train")
    assert [first[i] for i in (7, 2, 5)] == [again[i] for i in (7, 2, 5)]
    assert first[0:20] != other[0:20]
    assert first[-1] == first[len(first) - 1]
    with pytest.raises(IndexError):
        first[len(first)]
    assert len(list(task(train_problems=5).prompts("train"))) == 5
    assert task(3).prompts("eval") == task(4).prompts("eval")


def test_the_splits_are_disjoint_by_what_a_problem_is() -> None:
    train, held_out = task(1).prompts("train"), task(1).prompts("eval")
    texts = [TOKENIZER.decode(list(prompt.token_ids)) for prompt in held_out]
    assert len(set(texts)) == len(texts) == 448
    assert not {prompt.token_ids for prompt in train[0:2000]} & {prompt.token_ids for prompt in held_out}
    assert all(is_held_out(str(as_sum(prompt))) for prompt in held_out)
    assert not any(is_held_out(str(as_sum(prompt))) for prompt in train[0:500])


def as_sum(prompt: Prompt) -> Sum:
    text = TOKENIZER.decode(list(prompt.token_ids)).removesuffix("=")
    return Sum(tuple(int(term) for term in text.replace("-", "+-").split("+")))


def test_answers_are_what_the_problem_adds_up_to() -> None:
    for prompt in [*task().prompts("train")[0:100], *task().prompts("eval")[:100]]:
        assert sum(as_sum(prompt).terms) == int(prompt.answer)


def test_every_beginning_of_the_eval_split_has_all_numbers_of_terms_evenly() -> None:
    counts = [number_of_terms(prompt) for prompt in task().prompts("eval")]
    assert counts[:14] == [2, 3, 4, 5, 6, 7, 8] * 2
    assert {counts.count(n) for n in range(2, 9)} == {64}


def test_the_train_split_has_all_numbers_of_terms_about_evenly() -> None:
    counts = [number_of_terms(prompt) for prompt in task().prompts("train")[0:1400]]
    assert set(counts) == set(range(2, 9))
    assert all(150 <= counts.count(n) <= 250 for n in range(2, 9))


def test_the_lengths_of_careful_replies_within_one_step_vary_by_half_their_mean() -> None:
    step = task().prompts("train")[0:16]
    lengths = np.array([len(worked_solution(as_sum(prompt))) + 1 for prompt in step])
    assert lengths.std() / lengths.mean() >= 0.5


def test_settings_that_cannot_work_are_all_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        task(min_terms=1, max_operand=60, train_problems=0)
    message = str(caught.value)
    assert "task.min_terms=1" in message and "task.max_value=99" in message and "task.train_problems=0" in message


def test_more_held_out_problems_than_there_are_is_an_error_that_says_so() -> None:
    with pytest.raises(UserError, match="task.eval_problems=100.*distinct held-out problems"):
        task(max_terms=2, max_operand=2, max_value=10, eval_problems=100)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(UserError, match="'test'"):
        task().prompts("test")


def test_text_leaves_special_tokens_out() -> None:
    tokenizer: PreTrainedTokenizerBase = TOKENIZER
    assert task(eval_problems=1).text([*tokenizer.encode("1+2"), tokenizer.eos_token_id]) == "1+2"
