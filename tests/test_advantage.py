"""Advantages: worked numbers, what they sum to, and what happens when there is nothing to compare with."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import made
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import scored

from grpo_cli.experimental import lightning_rl, mc_grpo, xrpo
from grpo_cli.methods import dr_grpo, rloo
from grpo_cli.rules import advantage
from grpo_cli.select import select
from grpo_cli.support.errors import UserError
from grpo_cli.types import AdvantageInputs, Reward, ScoredGroup

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


MEDIAN = partial(mc_grpo.median, scale="std", floor=1e-3, stats_over="group")


def test_the_median_is_subtracted_and_the_spread_divided_by():
    # median .2, distances .2 .1 0 .3 .8, of which .2 is in the middle
    rewards = torch.tensor([0.0, 0.1, 0.2, 0.5, 1.0], dtype=torch.float64)
    mad = mc_grpo.median(rewards, rewards, scale="mad", floor=1e-3, stats_over="group")
    assert mad.tolist() == pytest.approx([-0.9950, -0.4975, 0.0, 1.4925, 3.9801], abs=5e-5)
    plain = mc_grpo.median(rewards, rewards, scale="none", floor=1e-3, stats_over="group")
    assert plain.tolist() == pytest.approx([-0.2, -0.1, 0.0, 0.3, 0.8])


@pytest.mark.parametrize(("scale", "rare"), [("mad", 1000.0), ("std", 1.9960)])
def test_three_right_of_nine(scale, rare):
    """The deviation is 1/2; the median distance from the median is 0, which leaves the floor."""
    rewards = torch.tensor([0.0] * 6 + [1.0] * 3, dtype=torch.float64)
    values = mc_grpo.median(rewards, rewards, scale=scale, floor=1e-3, stats_over="group")
    assert values.tolist() == pytest.approx([0.0] * 6 + [rare] * 3, rel=1e-4)


def test_the_median_is_of_the_group_that_the_kept_were_chosen_from():
    """Without the middle one of 0 1 5, the kept have 0 and 5 alone, and 2.5 in their middle."""
    kept, group = torch.tensor([0.0, 5.0]), torch.tensor([0.0, 1.0, 5.0])
    plain = partial(mc_grpo.median, scale="none", floor=1e-3)
    assert plain(kept, group, stats_over="group").tolist() == [-1.0, 4.0]
    assert plain(kept, group, stats_over="kept").tolist() == [-2.5, 2.5]


@settings(max_examples=60)
@given(rewards=st.lists(st.integers(-9, 9), min_size=1, max_size=9).filter(lambda some: len(some) % 2), data=st.data())
def test_the_middle_of_an_odd_group_has_no_advantage_and_half_of_the_others_no_less(rewards, data):
    values = torch.tensor(rewards, dtype=torch.float64)
    found = MEDIAN(values, values)
    middle = sorted(rewards)[len(rewards) // 2]
    assert all(found[place] == 0.0 for place, reward in enumerate(rewards) if reward == middle)
    assert 2 * int((found >= 0).sum()) > len(rewards) and 2 * int((found <= 0).sum()) > len(rewards)
    order = data.draw(st.permutations(range(len(rewards))))
    assert torch.allclose(MEDIAN(values[order], values[order]), found[order])


def test_the_release_divides_by_the_median_distance_and_leaves_the_middle_rollout_out():
    """Median .2, distances .2 .1 0 .3 .8, of which .2 is in the middle: each over .201."""
    group = scored(*[Reward(total) for total in (0.0, 1.0, 0.2, 0.5, 0.1)])
    release = made.advantage("median_release")
    found = select(group, [""] * 5, 4, mc_grpo.all_but_the_middle, release, np.random.default_rng(0), True)
    assert found.indices == (0, 1, 3, 4)
    assert found.advantages.tolist() == pytest.approx([-0.995025, 3.980100, 1.492537, -0.497512], abs=1e-5)
    # of 0/1 rewards only the floor is left
    thirds = scored(*[Reward(total) for total in (0.0, 1.0, 0.0)])
    found = select(thirds, [""] * 3, 2, mc_grpo.all_but_the_middle, release, np.random.default_rng(0), True)
    assert sorted(found.advantages.tolist()) == pytest.approx([0.0, 1000.0])


def asked(function, group: ScoredGroup, kept: list[int] | None = None, **words) -> list[float]:
    """Of the kept rollouts; all are the baseline."""
    everything = list(range(len(group.rollouts)))
    kept = everything if kept is None else kept
    totals = torch.tensor(group.totals)
    inputs = AdvantageInputs(group, tuple(kept), tuple(everything))
    return function(totals[kept], totals, inputs, **words).tolist()


NOVELTY = partial(xrpo.novelty, stats_over="kept", eps=0.0, bonus=2.5, cap=0.5)


def test_a_right_answer_earns_more_the_less_likely_it_was():
    likely = torch.tensor([-0.2, -0.4, -0.9], dtype=torch.float64)
    bonus = xrpo.rarity_bonus(torch.full((3,), 0.8, dtype=torch.float64), likely - likely.mean(), 2.5, 0.5)
    assert bonus.tolist() == pytest.approx([0.0, 0.0, 0.4])
    # without the cap 2.5 (1 - e^-.4); none for an advantage that is not above 0
    bonus = xrpo.rarity_bonus(torch.tensor([0.8, -0.8]), torch.tensor([-0.4, -0.4]), 2.5, 10.0)
    assert bonus.tolist() == pytest.approx([0.8242, 0.0], abs=5e-5)


def test_novelty_is_grpo_but_for_the_rare_among_the_right():
    """Means of tokens: -.2 and -.9 right, -.5 and -.4 wrong, -.5 in the mean. Their number does not count."""
    rewards = [Reward(1.0), Reward(1.0), Reward(0.0), Reward(0.0)]
    group = scored(*rewards, logprobs=[(-0.2,), (-0.4, -1.4), (-0.5, -0.5, -0.5), (-0.4,)])
    plain = advantage.grpo(torch.tensor(group.totals), torch.tensor(group.totals), stats_over="kept", eps=0.0).tolist()
    high = plain[0]
    assert asked(NOVELTY, group) == close([high, 1.5 * high, -high, -high])
    small = partial(xrpo.novelty, stats_over="kept", eps=0.0, bonus=0.1, cap=0.5)
    assert asked(small, group)[1] == pytest.approx(high + 0.1 * (1 - math.exp(-0.4)))
    none = partial(xrpo.novelty, stats_over="kept", eps=0.0, bonus=0.0, cap=0.5)
    assert asked(none, group) == plain


def test_a_wrong_answer_earns_nothing_by_being_rare_however_good_it_is_for_a_wrong_one():
    """Wrong, but above the mean: 0.9 of 0, 0 and 0.9."""
    rewards = [Reward(total, {"correct": 0.0}) for total in (0.0, 0.0, 0.9)]
    group = scored(*rewards, logprobs=[(-0.1,), (-0.1,), (-5.0,)])
    totals = torch.tensor(group.totals)
    assert asked(NOVELTY, group) == advantage.grpo(totals, totals, stats_over="kept", eps=0.0).tolist()


def test_how_likely_the_others_were_is_asked_of_those_that_are_compared_with():
    """Of the kept, -1 and -2: -1.5 in the mean. Of the group with another of -6: -3, beside which -2 is not rare."""
    group = scored(0, 1, 0, logprobs=[(-1.0,), (-2.0,), (-6.0,)])
    over = {word: partial(NOVELTY, stats_over=word, cap=9.0) for word in BOTH}
    plain = {word: partial(NOVELTY, stats_over=word, bonus=0.0) for word in BOTH}
    gained = {word: asked(over[word], group, [0, 1])[1] - asked(plain[word], group, [0, 1])[1] for word in BOTH}
    assert gained == {"kept": pytest.approx(2.5 * (1 - math.exp(-0.5))), "group": 0.0}


def test_a_part_counts_by_its_weight_and_not_by_its_scale():
    """Two parts of scale 1 and 100, of which each rollout has one or both: whitened both are +-.866."""
    rewards = [
        replace(reward, weights={"right": 1.0, "short": 1.0})
        for reward in (
            Reward(101.0, {"right": 1.0, "short": 100.0}),
            Reward(1.0, {"right": 1.0, "short": 0.0}),
            Reward(100.0, {"right": 0.0, "short": 100.0}),
            Reward(0.0, {"right": 0.0}),  # what it does not have is 0
        )
    ]
    per_part = partial(lightning_rl.per_part, stats_over="kept", eps=0.0)
    high = 3**0.5 / 2
    assert asked(per_part, scored(*rewards), weights={}) == close([2 * high, 0, 0, -2 * high])
    assert asked(per_part, scored(*rewards), weights={"short": 0.5}) == close(
        [1.5 * high, 0.5 * high, -0.5 * high, -1.5 * high]
    )
    assert asked(per_part, scored(*rewards), weights={"short": 0}) == close([high, high, -high, -high])
    order = [2, 0, 3, 1]
    moved = asked(per_part, scored(*[rewards[place] for place in order]), weights={"short": 0.5})
    assert moved == close([-0.5 * high, 1.5 * high, -1.5 * high, 0.5 * high])


def test_parts_are_compared_where_it_is_asked_for_and_add_nothing_where_they_are_equal():
    """Kept are 0 and 4 of 0 4 8: means 2 and 4, deviations sqrt(8) and 4."""
    weights = {"a": 1.0, "same": 1.0}
    group = scored(*[Reward(value + 0.1, {"a": value, "same": 0.1}, weights=weights) for value in (0.0, 4.0, 8.0)])
    per_part = partial(lightning_rl.per_part, weights={}, eps=0.0)
    assert asked(per_part, group, [0, 1], stats_over="kept") == close([-(0.5**0.5), 0.5**0.5])
    assert asked(per_part, group, [0, 1], stats_over="group") == close([-1.0, 0.0])


PER_PART = partial(lightning_rl.per_part, stats_over="kept", eps=0.0)


def test_without_parts_the_total_is_the_only_one():
    group = scored(*[Reward(0.0), Reward(2.0), Reward(4.0)])
    assert asked(PER_PART, group, weights={}) == close([-1, 0, 1])
    assert asked(PER_PART, group, weights={"short": 2.0}) == close([-1, 0, 1])


def test_a_part_that_is_only_logged_teaches_nothing_unless_it_is_named():
    rewards = [Reward(0.0, {"correct": 0.0, "well_formed": well}, weights={"correct": 1.0}) for well in (1.0, 0.0, 0.0)]
    assert asked(PER_PART, scored(*rewards), weights={}) == [0.0, 0.0, 0.0]
    rise = 1 / 3**0.5
    assert asked(PER_PART, scored(*rewards), weights={"well_formed": 0.5}) == close([rise, -rise / 2, -rise / 2])


def test_a_part_weighs_what_it_does_in_the_total_unless_it_is_named():
    """Whitened, 0 2 4 are -1 0 1 and 30 10 20 are 1 -1 0."""
    weights = {"a": 1.0, "b": -0.1}
    rewards = [
        Reward(a - 0.1 * b, {"a": a, "b": b, "seen": a * b}, weights=weights)
        for a, b in ((0.0, 30.0), (2.0, 10.0), (4.0, 20.0))
    ]
    assert asked(PER_PART, scored(*rewards), weights={}) == close([-1.1, 0.1, 1.0])
    assert asked(PER_PART, scored(*rewards), weights={"b": 2}) == close([1.0, -2.0, 1.0])


def test_a_part_that_the_total_of_a_rollout_leaves_out_is_0_for_it():
    """As with formats_on=wrong: the form of the right answer is not looked at."""
    rewards = [
        Reward(1.0, {"correct": 1.0, "format": 1.0}, weights={"correct": 1.0}),
        Reward(0.5, {"correct": 0.0, "format": 1.0}, weights={"correct": 1.0, "format": 0.5}),
        Reward(0.0, {"correct": 0.0, "format": 0.0}, weights={"correct": 1.0, "format": 0.5}),
    ]
    rise = 1 / 3**0.5
    right, form = (2 * rise, -rise, -rise), (-rise, 2 * rise, -rise)
    expected = [one + 0.5 * other for one, other in zip(right, form, strict=True)]
    assert asked(PER_PART, scored(*rewards), weights={}) == close(expected)


def test_parts_whose_weights_nobody_knows_count_where_they_add_up_to_the_total():
    adding = [Reward(a + b, {"a": a, "b": b}) for a, b in ((0.0, 30.0), (2.0, 10.0), (4.0, 20.0))]
    assert asked(PER_PART, scored(*adding), weights={}) == close([0.0, -1.0, 1.0])
    others = [Reward(a, {"a": a, "b": b}) for a, b in ((0.0, 30.0), (2.0, 10.0), (4.0, 20.0))]
    assert asked(PER_PART, scored(*others), weights={}) == close([-1.0, 0.0, 1.0])


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.tuples(*[st.integers(-9, 9).map(float)] * 3), min_size=2, max_size=7),
    weights=st.tuples(*[st.sampled_from([-2.0, 0.0, 0.5, 1.0])] * 2),
    typed=st.dictionaries(st.sampled_from("ab"), st.sampled_from([-1.0, 0.0, 3.0])),
    data=st.data(),
)
def test_each_part_is_whitened_among_the_rewards_that_are_compared(parts, weights, typed, data):
    """By the definition, in Python's floats; c is only logged, and the rejected may be out of the statistics."""
    size = len(parts)
    baseline = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=2)))
    kept = sorted(data.draw(st.sets(st.sampled_from(baseline), min_size=1)))
    rewards = [
        Reward(weights[0] * a + weights[1] * b, {"a": a, "b": b, "c": c}, weights={"a": weights[0], "b": weights[1]})
        for a, b, c in parts
    ]
    group = scored(*rewards)
    totals = torch.tensor(group.totals)
    inputs = AdvantageInputs(group, tuple(kept), tuple(baseline))
    for stats_over, compared in (("kept", kept), ("group", baseline)):
        found = lightning_rl.per_part(
            totals[kept], totals[baseline], inputs, weights=typed, stats_over=stats_over, eps=0.5
        )
        expected = [0.0] * len(kept)
        for place, part in enumerate("ab"):
            column = [one[place] for one in parts]
            mean = sum(column[i] for i in compared) / len(compared)
            squares = sum((column[i] - mean) ** 2 for i in compared)
            if len({column[i] for i in compared}) > 1:
                weight = typed.get(part, weights[place]) / ((squares / (len(compared) - 1)) ** 0.5 + 0.5)
                expected = [one + weight * (column[i] - mean) for one, i in zip(expected, kept, strict=True)]
        assert found.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("weight", ["much", True, float("nan"), None])
def test_a_weight_is_a_number(weight):
    with pytest.raises(UserError, match=r"advantage.weights.short=.* must be a number"):
        asked(lightning_rl.per_part, scored(*[Reward(0.0)] * 2), weights={"short": weight}, stats_over="kept", eps=0.0)
