"""Each warning comes when it should, names a key that exists, and does not repeat itself."""

from __future__ import annotations

import math

import pytest

from grpo_cli.tracking.health import HealthCheck

WELL = {"reward/mean": 0.5, "reward/std": 0.5, "response/truncated": 0.25, "eval/problems": 20.0}
WELL |= {"group/zero_std": 0.9, "mismatch/ratio_mean": 1.1}


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("reward/mean", 0.5, ""),  # at the edge of every limit there is no warning
        ("response/truncated", 0.44, "sampling.max_new_tokens"),
        ("group/zero_std", 0.91, "sampling.temperature"),
        ("eval/problems", 19.0, "eval.problems"),
        ("mismatch/ratio_mean", 0.89, "correction"),
        ("mismatch/ratio_mean", math.nan, "correction"),
    ],
)
def test_a_cause_is_reported_once_also_where_it_comes_and_goes(name, value, key):
    check, ill = HealthCheck(), {**WELL, name: value}
    found = check.check(ill)
    assert len(found) == bool(key) and all(key in warning and name in warning for warning in found)
    assert [check.check(metrics) for metrics in (ill, {}, WELL, ill)] == [[]] * 4


@pytest.mark.parametrize(
    ("name", "values", "reported"),
    [
        ("response/truncated", [0.3, 0.59, 0.61, 0.9, 0.3, 0.99], [1, 0, 1, 0, 0, 0]),
        ("mismatch/ratio_mean", [1.2, 1.4, 1.5, 1 / 1.5, 5.0, math.inf, math.nan, 0.0], [1, 0, 1, 0, 1, 1, 0, 0]),
        ("off/ess", [0.08, 0.05, 0.04, 0.0, 0.0], [1, 0, 1, 1, 0]),
        ("off/token_share", [0.1, 0.15, 0.2, 0.0, 0.2], [1, 0, 1, 0, 0]),
        # at the fifth step in a row, and after twice as many; the fifth value breaks the row
        ("reward/std", [0.0] * 4 + [0.1] + [0.0] * 21, [0] * 9 + [1] + [0] * 4 + [1] + [0] * 9 + [1, 0]),
    ],
)
def test_a_cause_is_reported_again_when_it_is_twice_as_bad(name, values, reported):
    check = HealthCheck()
    assert [len(check.check({**WELL, name: value})) for value in values] == reported


def test_what_follows_from_another_cause_is_not_reported_beside_it():
    check, cut_off = HealthCheck(), {**WELL, "response/truncated": 1.0, "group/zero_std": 1.0, "reward/std": 0.0}
    assert [len(check.check(cut_off)) for _ in range(9)] == [1] + [0] * 8
    check, equal = HealthCheck(), {**WELL, "reward/std": 0.0}
    assert [len(check.check(equal)) for _ in range(4)] == [0] * 4
    (text,) = check.check({**equal, "group/zero_std": 1.0})
    assert text.startswith("every reward of the last 5 steps") and "task" in text


COLLAPSED = {"policy/entropy": 0.04, "group/zero_std": 0.5, "reward/correct": 0.3, "reward/mean": 0.9}


@pytest.mark.parametrize(
    ("first", "then", "warned"),
    [
        (0.5, {}, ["policy/entropy", "0.040", "0.500", "optim.lr", "loss.kl_coef"]),
        (0.3, {}, []),  # more than a tenth is left
        (0.5, {"group/zero_std": 0.49}, []),
        (0.5, {"reward/correct": 0.8}, []),
    ],
)
def test_entropy_that_is_gone_before_the_problems_are_solved_is_warned_of(first, then, warned):
    """In the sixth step; not one that is left, or that has a good reason to be gone."""
    check = HealthCheck()
    assert [check.check({**WELL, **COLLAPSED, "policy/entropy": first}) for _ in range(5)] == [[]] * 5
    found = check.check({**WELL, **COLLAPSED, **then})
    assert len(found) == bool(warned) and all(word in found[0] for word in warned)
