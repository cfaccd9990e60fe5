"""Intervals and quantiles agree with tables, with brute force and with what they promise to cover."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.support.intervals import mean_interval, pass_at_k, student_95, wilson_interval


def test_student_s_quantiles_are_those_of_the_tables():
    tables = {1: 12.7062047, 2: 4.3026527, 9: 2.2621572, 10: 2.2281389, 30: 2.0422725, 120: 1.9799304, 1000: 1.9623391}
    assert {freedom: student_95(freedom) for freedom in tables} == pytest.approx(tables, rel=1e-7)
    assert student_95(200) > student_95(201) > 1.959964


@settings(max_examples=40)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(answers, data):
    subsets = [*itertools.combinations(answers, data.draw(st.integers(1, len(answers))))]
    found = pass_at_k(sum(answers), len(answers), len(subsets[0]))
    assert found == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


@settings(max_examples=40)
@given(st.integers(1, 300), st.data())
def test_wilson_interval_holds_the_shares_that_a_score_test_accepts(n, data):
    assert wilson_interval(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)  # as tables have it
    successes = data.draw(st.integers(0, n))
    low, high = wilson_interval(successes, n)
    share = successes / n
    assert 0.0 <= low <= share <= high <= 1.0
    for end in (low, high):  # the definition: the ends are where |share - p| is 1.96 standard errors of p
        if 0.0 < end < 1.0:
            assert abs(share - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / n), rel=1e-5)


def test_an_interval_uses_that_values_between_carry_more_than_coin_flips():
    """Those of zeros and ones carry as much."""
    values = [0.25, 0.75] * 50  # p(1-p) = 1/4, s^2 = 1/16: as certain as 400 coin flips
    for trials, flips in ((8, 400), (2, 200), (1, 100)):
        assert mean_interval(values, trials) == pytest.approx(wilson_interval(flips // 2, flips))
    for right in range(8):
        values = [1.0] * right + [0.0] * (7 - right)
        assert mean_interval(values, trials=3) == pytest.approx(wilson_interval(right, 7))
