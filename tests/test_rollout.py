"""Requests, groups and scores: seeds are functions of names, groups are whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from made import infinite
from small import contents, make_engine, small_model

from grpo_cli.collect.epochs import Epochs
from grpo_cli.collect.requests import group_rollouts, requests_for, score_all, seed_of
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Prompt, Reward, Rollout

PROMPTS = [Prompt("a", (5, 6, 7), "x"), Prompt("b", (8, 9), "y")]


class LengthTask:
    """Rewards a rollout with its length; `bad` is the reward of sample 1."""

    def __init__(self, bad: float | None = None) -> None:
        self.bad = bad

    def prompts(self, split: str) -> Sequence[Prompt]:
        return PROMPTS

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        if self.bad is not None and rollout.request.sample == 1:
            return Reward(self.bad)
        return Reward(float(len(rollout)))

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


def test_a_seed_is_a_function_of_its_names() -> None:
    assert seed_of(0, 1, "a", 2) == seed_of(0, 1, "a", 2)
    others = {seed_of(*names) for names in [(1, 1, "a", 2), (0, 2, "a", 2), (0, 1, "b", 2), (0, 1, "a", 3)]}
    assert len(others | {seed_of(0, 1, "a", 2)}) == 5
    assert 0 <= seed_of("anything") < 2**64
    assert seed_of(1, 12) != seed_of(11, 2), "names are kept apart"


def order_of(count: int, per_step: int, steps: range, seed: int = 0) -> list[str]:
    """The prompts of some steps, as one text a step."""
    prompts = [Prompt(chr(ord("a") + i), (5, 6), "") for i in range(count)]
    order = Epochs(prompts, per_step, seed)
    return ["".join(prompt.id for prompt in order.pick(step, per_step, frozenset())) for step in steps]


def test_an_epoch_takes_no_prompt_twice_and_the_next_takes_them_in_another_order() -> None:
    epochs = [order_of(7, 2, range(3 * epoch, 3 * epoch + 3)) for epoch in range(20)]
    assert all(len(step) == 2 for steps in epochs for step in steps)
    assert all(len(set("".join(steps))) == 6 for steps in epochs)
    assert len({tuple(steps) for steps in epochs}) > 10  # of 5040 orders
    assert set("".join(sum(epochs, []))) == set("abcdefg")  # one is left over each time, and not the same
    assert order_of(7, 2, range(60)) == sum(epochs, []), "whatever was asked for before"
    assert order_of(7, 2, range(60), seed=1) != sum(epochs, [])


def test_groups_are_whole_and_in_order_whatever_the_order_of_finishing() -> None:
    requests = requests_for(PROMPTS, 4, Sampling.plain(20), seed=0, step=0)
    rollouts = list(make_engine(small_model(), sampler=infinite(slots=2)).generate(requests))
    assert [r.request for r in rollouts] != requests
    groups = group_rollouts(PROMPTS, rollouts)
    assert [r.request for g in groups for r in g.rollouts] == requests
    assert contents(r for g in groups for r in g.rollouts) == contents(rollouts)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, -9.1e15])
def test_a_reward_that_is_no_number_stops_the_run_by_name(bad: float) -> None:
    requests = requests_for(PROMPTS, 2, Sampling.plain(5), seed=0, step=0)
    groups = group_rollouts(PROMPTS, make_engine(small_model()).generate(requests))
    assert score_all(LengthTask(), groups)[0].totals.tolist() == [float(len(r)) for r in groups[0].rollouts]
    with pytest.raises(UserError, match="sample 1 of prompt a"):
        score_all(LengthTask(bad), groups)


def test_a_task_that_can_is_asked_once_about_all_rollouts() -> None:
    asked: list[int] = []

    class AllAtOnce(LengthTask):
        def rewards(self, pairs: Sequence[tuple[Prompt, Rollout]]) -> list[Reward]:
            asked.append(len(pairs))
            return [self.reward(prompt, rollout) for prompt, rollout in pairs]

    requests = requests_for(PROMPTS, 2, Sampling.plain(9), seed=0, step=0)
    groups = group_rollouts(PROMPTS, make_engine(small_model()).generate(requests))
    one_by_one = [scored.totals.tolist() for scored in score_all(LengthTask(), groups)]
    assert [scored.totals.tolist() for scored in score_all(AllAtOnce(), groups)] == one_by_one
    assert asked == [4] and score_all(AllAtOnce(), []) == []
