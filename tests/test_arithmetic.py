"""The embedded task: its problems, its splits and its judge."""

from __future__ import annotations

from collections import Counter
from random import Random

import made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.model.load import load_tokenizer
from grpo_cli.settings import Sampling
from grpo_cli.tasks.arithmetic import Arithmetic, draw_sum, worked_solution
from grpo_cli.types import Finish, Prompt, Request, Reward, Rollout

TOKENIZER = load_tokenizer(made.model())


def task(seed: int = 0, **changes: int) -> Arithmetic:
    return made.task("arithmetic", TOKENIZER, seed, **changes)


def judge(reply: str, answer: str, finish: Finish = Finish.EOS) -> Reward:
    prompt = Prompt("p", (3,), answer)
    ids = TOKENIZER.encode(reply) + ([TOKENIZER.eos_token_id] if finish is Finish.EOS else [])
    rollout = Rollout(Request(prompt, 0, 0, Sampling.plain(128)), tuple(ids), (0.0,) * len(ids), finish)
    return task(eval_problems=1).reward(prompt, rollout)


def number_of_terms(prompt: Prompt) -> int:
    text = TOKENIZER.decode(list(prompt.token_ids))
    return 1 + text.count("+") + text.count("-")


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), num_terms=st.integers(2, 8))
def test_a_sum_stays_within_its_bounds_and_its_worked_solution_is_right(seed: int, num_terms: int) -> None:
    problem = draw_sum(Random(seed), num_terms, max_operand=9, max_value=99)
    assert len(problem.terms) == num_terms and all(1 <= abs(term) <= 9 for term in problem.terms[1:])
    assert all(0 <= sum(problem.terms[: i + 1]) <= 99 for i in range(num_terms))
    reply, answer = worked_solution(problem), sum(problem.terms)
    assert judge(reply, str(answer)).parts == {"correct": 1.0}
    assert judge(reply, str(answer + 1)).total == 0.0


NO_NUMBER = ["", "4 4", *"= 44= 044 +44 -44 4<pad>4 <eos>44 44+0 (44) 44, 14+30 144 4 é44".split()]


@pytest.mark.parametrize("reply", NO_NUMBER)
def test_anything_but_the_plain_number_earns_nothing(reply: str) -> None:
    assert judge(reply, "44").total == 0.0


def test_a_right_number_without_an_end_earns_nothing() -> None:
    assert judge("14+30=44", "44", Finish.LENGTH) == Reward(0.0, {"correct": 0.0}, weights={"correct": 1.0})


def test_all_numbers_of_terms_come_evenly() -> None:
    """In every beginning of the eval split, and about so in the train split."""
    held_out, train = (
        map(number_of_terms, task().prompts("eval")),
        map(number_of_terms, task().prompts("train")[0:1400]),
    )
    counts = [*held_out]
    assert counts[:14] == [2, 3, 4, 5, 6, 7, 8] * 2 and set(Counter(counts).values()) == {64}
    assert len(found := Counter(train)) == 7 and all(150 <= count <= 250 for count in found.values())
