"""Advantages: worked numbers, what they sum to, and what happens when there is nothing to compare with."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.methods import dr_grpo, rloo
from grpo_cli.rules import advantage

GRPO = partial(advantage.grpo, eps=1e-4)
FUNCTIONS = [GRPO, dr_grpo.dr_grpo, rloo.rloo]
BOTH = ["kept", "group"]


def close(values: list[float]):
    return pytest.approx(values, rel=1e-5, abs=1e-7)


def test_grpo_divides_by_the_unbiased_deviation_plus_epsilon():
    # mean 2, deviations -2 0 2, sum of squares 8, unbiased variance 4
    rewards = torch.tensor([0.0, 2.0, 4.0])
    assert advantage.grpo(rewards, rewards, stats_over="kept", eps=0.0).tolist() == close([-1, 0, 1])
    assert advantage.grpo(rewards, rewards, stats_over="kept", eps=2.0).tolist() == close([-0.5, 0, 0.5])
    assert GRPO(rewards, rewards, stats_over="kept").tolist() == close([-2 / 2.0001, 0, 2 / 2.0001])


def test_two_kept_rollouts_get_the_same_advantages_whatever_the_gap():
    for gap in (1.0, 100.0):
        kept = torch.tensor([0.0, gap])
        assert advantage.grpo(kept, kept, stats_over="kept", eps=0.0).tolist() == close([-(0.5**0.5), 0.5**0.5])


def test_statistics_come_from_where_they_are_asked_for():
    # kept 0 4 of the group 0 4 8: means 2 and 4, unbiased deviations sqrt(8) and 4
    kept, group = torch.tensor([0.0, 4.0]), torch.tensor([0.0, 4.0, 8.0])
    assert advantage.grpo(kept, group, stats_over="kept", eps=0.0).tolist() == close([-2 / 8**0.5, 2 / 8**0.5])
    assert advantage.grpo(kept, group, stats_over="group", eps=0.0).tolist() == close([-1, 0])
    assert dr_grpo.dr_grpo(kept, group, stats_over="kept").tolist() == close([-2, 2])
    assert dr_grpo.dr_grpo(kept, group, stats_over="group").tolist() == close([-4, 0])
    # left out: the other kept one; then the mean of the other two of the group
    assert rloo.rloo(kept, group, stats_over="kept").tolist() == close([0 - 4, 4 - 0])
    assert rloo.rloo(kept, group, stats_over="group").tolist() == close([0 - 6, 4 - 4])


@settings(max_examples=50)
@given(rewards=st.lists(st.integers(-20, 20), min_size=2, max_size=8), kept=st.integers(1, 8))
def test_rloo_subtracts_the_mean_of_the_others(rewards, kept):
    group = torch.tensor(rewards, dtype=torch.float32)
    for reference, stats_over in ((group[:kept], "kept"), (group, "group")):
        values = rloo.rloo(group[:kept], group, stats_over=stats_over).tolist()
        if len(reference) == 1:
            assert values == [0.0]
            continue
        for i, value in enumerate(values):
            others = [float(reference[j]) for j in range(len(reference)) if j != i]
            assert value == pytest.approx(float(reference[i]) - sum(others) / len(others), abs=1e-4)


@settings(max_examples=50)
@given(rewards=st.lists(st.integers(-20, 20), min_size=2, max_size=12))
def test_advantages_over_the_kept_sum_to_zero_and_their_squares_to_one_less_than_their_number(rewards):
    kept = torch.tensor(rewards, dtype=torch.float32)
    for rule in FUNCTIONS:
        assert float(rule(kept, kept, stats_over="kept").sum()) == pytest.approx(0, abs=1e-3)
    squares = float(GRPO(kept, kept, stats_over="kept").square().sum())
    # deviations of integers are at least about 0.3, so eps = 1e-4 changes little
    assert squares == pytest.approx(0 if len(set(rewards)) == 1 else len(rewards) - 1, rel=2e-3)


@pytest.mark.parametrize("function", [*FUNCTIONS, partial(advantage.grpo, eps=0.0)])
@pytest.mark.parametrize("stats_over", BOTH)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, 1e8 + 0.1, -3.3])
def test_equal_rewards_give_exactly_zero(function, stats_over, reward):
    """0.1 is no binary fraction: the mean of seven of them need not equal it, and 1e-9 / (0 + eps) is no zero."""
    rewards = torch.full((7,), reward, dtype=torch.float64)
    values = function(rewards[:5], rewards, stats_over=stats_over)
    assert values.tolist() == [0.0] * 5


@pytest.mark.parametrize("function", FUNCTIONS)
def test_equal_kept_rewards_still_differ_from_the_rest_of_the_group(function):
    kept, group = torch.ones(2), torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert (function(kept, group, stats_over="kept") == 0).all()
    assert (function(kept, group, stats_over="group") > 0).all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_lone_rollout_has_no_advantage_over_itself(function):
    assert function(torch.tensor([3.0]), torch.tensor([3.0]), stats_over="kept").tolist() == [0.0]
    assert function(torch.tensor([3.0]), torch.tensor([3.0]), stats_over="group").tolist() == [0.0]
    # but it has one over the group it was kept from
    assert float(function(torch.tensor([3.0]), torch.tensor([3.0, 1.0]), stats_over="group")[0]) > 0


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("stats_over", BOTH)
def test_nothing_kept_gives_nothing(function, stats_over):
    assert function(torch.zeros(0), torch.tensor([1.0, 0.0]), stats_over=stats_over).shape == (0,)


def test_small_differences_between_large_rewards_survive():
    rewards = torch.tensor([1e8, 1e8 + 1], dtype=torch.float64)
    assert dr_grpo.dr_grpo(rewards, rewards, stats_over="kept").tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_keeping_the_whole_group_makes_both_statistics_the_same(function):
    rewards = torch.tensor([0.3, 0.1, 0.9, 0.4])
    kept = function(rewards, rewards, stats_over="kept")
    assert torch.equal(kept, function(rewards, rewards, stats_over="group"))
