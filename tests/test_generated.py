"""Generated tasks: problems of seed and index, splits that share nothing, sizes in turn; stories, sums, judges."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import rollout_of
from tiny_hf import make_tokenizer

from grpo_cli.model.load import load_tokenizer
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.arithmetic import draw_sum, worked_solution
from grpo_cli.tasks.generated import GeneratedTask, is_held_out
from grpo_cli.types import Finish, Reward

TINY, WORDS = load_tokenizer(made.model()), make_tokenizer()
TASKS = ("arithmetic", "word_problems")
# Settings under which there are few problems; and settings beyond their range, or that do not go with another one.
FEW: dict[str, dict[str, int]] = {
    "arithmetic": {"max_terms": 2, "max_operand": 2, "max_value": 10},
    "word_problems": {"max_start": 3, "max_change": 2},
}
BAD: dict[str, tuple[dict[str, int], dict[str, int], str]] = {
    "arithmetic": ({"min_terms": 1, "max_value": 10_000}, {"max_value": 3}, "task.max_operand="),
    "word_problems": ({"min_steps": 0, "max_change": 10_000}, {"min_steps": 3}, "task.max_steps="),
}


def task(name: str, seed: int = 0, **changes: Any) -> GeneratedTask[Any]:
    return made.task(name, WORDS if name == "word_problems" else TINY, seed, **changes)


@pytest.mark.parametrize("name", TASKS)
def test_train_is_a_function_of_seed_and_index_and_eval_of_neither(name: str) -> None:
    first, again, other = (task(name, seed).prompts("train") for seed in (3, 3, 4))
    assert [first[i] for i in (7, 2, 5)] == [again[i] for i in (7, 2, 5)]
    assert first[0:20] != other[0:20] and first[-1] == first[len(first) - 1]
    assert task(name, 3).prompts("eval") == task(name, 4).prompts("eval")
    assert len(list(task(name, train_problems=5).prompts("train"))) == 5
    for call in (lambda: first[len(first)], lambda: first[-len(first) - 1]):
        with pytest.raises(IndexError):
            call()


@pytest.mark.parametrize("name", TASKS)
def test_no_problem_of_one_split_is_in_the_other_and_none_is_twice_in_eval(name: str) -> None:
    asked = task(name, 1)
    assert len({prompt.token_ids for prompt in asked.prompts("eval")}) == len(asked.prompts("eval")) > 200
    for split, count in (("eval", 200), ("train", 1000)):
        problems = [asked._problem(prompt)[0] for prompt in asked.prompts(split)[:count]]
        assert {is_held_out(str(problem)) for problem in problems} == {split == "eval"}


@pytest.mark.parametrize("name", TASKS)
def test_what_cannot_be_is_refused_with_all_its_keys(name: str) -> None:
    with pytest.raises(UserError, match="task.eval_problems=700: only .*; lower it"):
        task(name, eval_problems=700, **FEW[name])
    beyond, together, other_key = BAD[name]
    with pytest.raises(UserError) as caught:
        task(name, eval_problems=0, **beyond)
    assert all(f"task.{key}=" in str(caught.value) for key in ("eval_problems", *beyond))
    with pytest.raises(UserError, match=f"task.{min(together)}=.*{other_key}"):
        task(name, **together)
    with pytest.raises(UserError, match="test"):
        task(name).prompts("test")


STORIES = task("word_problems", eval_problems=1)


def by_words(text: str) -> int:
    """The oracle: sentence by sentence, by what it says."""
    first, *others = re.findall(r"[^.?]*[0-9][^.?]*\.", text)
    (value,) = map(int, re.findall("[0-9]+", first))
    for sentence in others:
        (number,) = re.findall("[0-9]+", sentence)
        gains = re.search("gets|A friend gives|puts|adds|get on|arrive", sentence)
        value += int(number) if gains else -int(number)
    return value


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_a_story_says_its_sum(seed: int, steps: int) -> None:
    rng = Random(seed)
    story = STORIES.draw(rng, steps)
    told = STORIES.question(story, rng)
    assert by_words(told) == story.answer > 0 and eval(str(story)) == story.answer  # noqa: S307 (our own digits)
    assert len(story.terms) == 1 + steps and str(story.answer) not in re.findall("[0-9]+", told)


def test_the_final_number_counts() -> None:
    prompt = replace(STORIES.prompts("eval")[0], answer="19")
    replies = {"12 and 7 are 19. The answer is 19.0": 1.0, "19 shells, not 12": 0.0, "190": 0.0}
    for reply, right in replies.items():
        rollout = rollout_of(prompt, reply, WORDS)
        for ended in (1.0, 0.0):
            rollout = rollout if ended else replace(rollout, finish=Finish.LENGTH)
            assert STORIES.reward(prompt, rollout).parts == {"correct": right, "ended": ended}


def test_a_level_is_a_number_of_things_that_happen() -> None:
    task_of_two = task("word_problems", min_steps=2, max_steps=3, eval_problems=20)
    texts = [task_of_two.text(prompt.token_ids) for prompt in task_of_two.prompts("eval")]
    assert [len(re.findall("[0-9]+", text)) for text in texts] == [3, 4] * 10


def judge(reply: str, answer: str, finish: Finish = Finish.EOS) -> Reward:
    sums = task("arithmetic", eval_problems=1)
    rollout = rollout_of(replace(sums.prompts("eval")[0], answer=answer), reply, TINY)
    ids = rollout.token_ids if finish is Finish.EOS else rollout.token_ids[:-1]
    cut = replace(rollout, token_ids=ids, sampler_logprobs=(0.0,) * len(ids), finish=finish)
    return sums.reward(rollout.request.prompt, cut)


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
def test_anything_but_the_plain_number_and_its_end_earns_nothing(reply: str) -> None:
    assert judge(reply, "44").total == 0.0
    assert judge("14+30=44", "44", Finish.LENGTH) == Reward(0.0, {"correct": 0.0}, weights={"correct": 1.0})


def test_all_numbers_of_terms_come_evenly() -> None:
    """In every beginning of the eval split, and about so in the train split."""
    sums = task("arithmetic")
    held_out, train = (
        [len(re.findall("[0-9]+", sums.text(prompt.token_ids))) for prompt in sums.prompts(split)[:1400]]
        for split in ("eval", "train")
    )
    assert held_out[:14] == [2, 3, 4, 5, 6, 7, 8] * 2 and {*Counter(held_out).values()} == {64}
    assert len(found := Counter(train)) == 7 and all(150 <= count <= 250 for count in found.values())
