"""Ids: rollouts, prefills and seeds go by them, so no two prompts are ever taken for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import made
import pytest
from small import FakeEngine, contents, make_engine, small_model, some_requests
from tiny_hf import make_tokenizer

from grpo_cli.collect.epochs import Epochs
from grpo_cli.evaluate import evaluate
from grpo_cli.interfaces import Task
from grpo_cli.model.load import load_tokenizer
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.prompting import MadePrompts
from grpo_cli.types import Prompt, Request, Reward, Rollout

TOKENIZER = make_tokenizer()
A, B = Prompt("a", (5, 6, 7), "x"), Prompt("b", (8, 9), "y")
OTHER_A = Prompt("a", (9, 8, 4), "z")


class Fixed:
    """A task of the prompts that it is given."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def prompts(self, split: str) -> Sequence[Prompt]:
        return self._prompts

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return Reward(0.0)

    def text(self, token_ids: Sequence[int]) -> str:
        return ""


def lazy(prompts: Sequence[Prompt]) -> tuple[MadePrompts, list[int]]:
    """Prompts that are made when they are asked for, and which of them were."""
    made_of: list[int] = []
    return MadePrompts(lambda place: made_of.append(place) or prompts[place], len(prompts)), made_of


# What a task gives


def test_a_run_refuses_at_its_start_a_list_of_prompts_with_an_id_twice() -> None:
    for prompts in ([A, B, OTHER_A], (A, B, OTHER_A)):
        with pytest.raises(UserError, match=r"'a' is the id of two of the prompts to train on \(numbers 1 and 3\)"):
            Epochs(prompts, per_step=1, seed=0)
    Epochs([A, B, replace(OTHER_A, id="c")], per_step=1, seed=0)


def test_an_evaluation_refuses_an_id_that_comes_twice_before_the_first_rollout() -> None:
    for prompts in ([A, OTHER_A], lazy([B, A, A])[0]):
        with pytest.raises(UserError, match="'a' is the id of two"):
            evaluate(FakeEngine(), Fixed(prompts), prompts, Sampling.plain(128), k=2, seed=0)


@pytest.mark.parametrize("name", ["arithmetic", "word_problems"])
def test_prompts_of_generated_tasks_have_ids_of_their_own_over_both_splits(name: str) -> None:
    task: Task = made.task(name, load_tokenizer(made.model()))
    some = [task.prompts("train")[i].id for i in range(0, 1_000_000, 4001)]
    everyone = [*some, *(prompt.id for prompt in task.prompts("eval"))]
    assert len(everyone) > 500 and len(set(everyone)) == len(everyone)


# Rollouts and their groups


def test_the_engine_refuses_two_prompts_of_one_id_before_it_serves_anybody() -> None:
    """It keeps each prompt's keys under its id: the second was served with the tokens of the first."""
    engine, words = make_engine(small_model()), Sampling.plain(4)
    requests = [Request(prompt, 0, 7, words) for prompt in (A, B, OTHER_A)]
    with pytest.raises(UserError) as caught:
        next(engine.generate(requests))
    assert "two prompts have the id 'a', one of 3 tokens and one of 3 others" in str(caught.value)
    assert engine.stats().prefill_tokens == 0


def test_the_engine_takes_equal_prompts_for_one() -> None:
    requests = some_requests(prompts=2, n=2)
    copies = [replace(r, prompt=replace(r.prompt, token_ids=tuple(list(r.prompt.token_ids)))) for r in requests]
    engine = make_engine(small_model())
    expected = contents(engine.generate(requests))
    assert contents(engine.generate(copies)) == expected
    assert engine.stats().prefill_tokens == sum(len(r.prompt.token_ids) for r in requests[::2])
