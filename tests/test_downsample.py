"""Down-sampling rules: what they keep, how they break ties, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import kept_by, scored

from grpo_cli.methods import pods
from grpo_cli.rules import downsample
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import facts

CHOOSING_RULES = [pods.maxvar, pods.maxreward, pods.random, pods.percentile]


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# Real, four-valued and binary rewards: ties of every kind.
reward_lists = st.one_of(
    st.lists(st.floats(-100, 100).map(lambda x: round(x, 6)), min_size=2, max_size=9),
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=2, max_size=9),
    st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=9),
)


@settings(max_examples=200)
@given(rewards=reward_lists, data=st.data())
def test_maxvar_reaches_the_brute_force_variance_with_the_ends_only(rewards, data):
    keep = data.draw(st.integers(2, len(rewards)))
    kept = pods.maxvar(scored(*rewards), keep, stream(data.draw(st.integers(0, 3))))
    assert len(set(kept)) == keep
    best = max(float(np.var(subset)) for subset in itertools.combinations(rewards, keep))
    assert np.var([rewards[i] for i in kept]) == pytest.approx(best, rel=1e-9, abs=1e-12)
    chosen, ordered = sorted(rewards[i] for i in kept), sorted(rewards)
    assert any(chosen == ordered[: keep - k] + ordered[len(ordered) - k :] for k in range(keep + 1))


@pytest.mark.parametrize(
    ("rewards", "keep", "expected"),
    [
        ([0, 1, 2, 3, 10], 2, [0, 10]),
        ([1e9, 1e9 + 1, 1e9 + 2, 1e9 + 3, 1e9 + 10], 3, [1e9, 1e9 + 1, 1e9 + 10]),  # sums of squares would lose the 1
        ([0, 1, 2, 3, 10], 3, [0, 1, 10]),  # variance 20.2; 0 3 10 gives 17.6
        ([0, 0, 0, 0, 0, 0, 0, 1], 4, [0, 0, 0, 1]),  # fewer successes than half
    ],
)
def test_maxvar_on_groups_worked_out_by_hand(rewards, keep, expected):
    kept = kept_by(pods.maxvar, scored(*rewards), keep, stream())
    assert sorted(kept.totals) == expected


def test_percentile_takes_order_statistics_at_evenly_spaced_quantiles():
    """1/4 and 3/4 of eight: the 2nd and 6th smallest; of five 1.25 and 3.75: the 2nd and 4th."""
    for size, keep, expected in ((8, 2, [1, 5]), (5, 2, [1, 3]), (7, 3, [1, 3, 5])):
        rewards = stream(5).permutation(size).astype(float)  # reward = rank
        assert rewards[pods.percentile(scored(*rewards), keep, stream())].tolist() == expected


@pytest.mark.parametrize("rule", CHOOSING_RULES)
@pytest.mark.parametrize("rewards", [[1.0] * 10, [0.0, 1.0] * 5])
def test_rollouts_of_equal_reward_are_kept_equally_often(rule, rewards):
    """Chi-square over which of the tied samples are kept; 32.9 is the 0.9999 quantile for 9 degrees of freedom.

    In both groups each sample has probability keep / 10; with two reward levels the counts are more even still.
    `maxreward` keeps ones only in the second group: each of the five with probability 4 / 5.
    """
    group, keep, runs, rng = scored(*rewards), 4, 600, stream(11)
    counts = np.zeros(10)
    for _ in range(runs):
        counts[downsample.choose(rule, group, keep, rng)] += 1
    expected = np.full(10, runs * keep / 10)
    if rule is pods.maxreward and 0.0 in rewards:
        expected = np.array(rewards) * runs * keep / 5
        assert (counts[expected == 0] == 0).all()
    some = expected > 0
    assert ((counts[some] - expected[some]) ** 2 / expected[some]).sum() < 32.9


@pytest.mark.parametrize("rule", [downsample.all_rollouts, *CHOOSING_RULES])
@pytest.mark.parametrize("keep", [3, 5])
def test_a_group_of_m_or_fewer_is_kept_whole_and_in_order(rule, keep):
    assert downsample.choose(rule, scored(1.0, 0.0, 0.5), keep, stream()) == [0, 1, 2]


@pytest.mark.parametrize(
    "answer", [[0, 0], [0, 1, 2], [0, 3], [-1, 0], [0.0, 1.0], np.array([True, False, True]), None, [], "ab"]
)
def test_a_rule_that_answers_wrongly_is_named_with_its_prompt(answer):
    def my_rule(group, keep, rng):
        return answer

    with pytest.raises(UserError, match=r"my_rule returned .* for prompt p: return 2 different .* 0 to 2"):
        downsample.choose(my_rule, scored(1.0, 0.0, 0.5), 2, stream())


def test_a_rule_that_can_keep_fewer_keeps_one_or_more_each_once():
    answers = iter([[1], [], [1, 1], [0, 1, 2]])
    rule, group = facts(keeps_fewer=True)(lambda *given: next(answers)), scored(1.0, 0.0, 0.5)
    assert downsample.choose(rule, group, 2, stream()) == [1]
    for _ in range(3):
        with pytest.raises(UserError, match="return 1 to 2 different"):
            downsample.choose(rule, group, 2, stream())
