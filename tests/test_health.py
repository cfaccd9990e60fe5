"""Each warning comes when it should, names a key that exists, and does not repeat itself."""

from __future__ import annotations

import math

import pytest

from grpo_cli.tracking.health import HealthCheck

WELL = {"reward/mean": 0.5, "reward/std": 0.5, "response/truncated": 0.25, "eval/problems": 20.0, "off/ess": 0.1}
WELL |= {"group/zero_std": 0.9, "mismatch/ratio_mean": 1.1}


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("reward/mean", 0.5, ""),  # at the edge of every limit there is no warning
        ("group/zero_std", 0.91, "sampling.temperature"),
        ("eval/problems", 19.0, "eval.problems"),
        ("mismatch/ratio_mean", 0.89, "correction"),
        ("mismatch/ratio_mean", math.nan, "correction"),
        ("off/ess", 0.09, "optim.ess"),
        ("eval/accuracy", 0.0, "correct"),
    ],
)
def test_a_cause_is_reported_once_also_where_it_comes_and_goes(name, value, key):
    check, ill = HealthCheck(), {**WELL, name: value}
    found = check.check(ill)
    assert len(found) == bool(key) and all(key in warning and name in warning for warning in found)
    assert [check.check(metrics) for metrics in (ill, {}, WELL, ill)] == [[]] * 4


def test_rewards_that_stay_equal_are_reported_alone_and_only_if_replies_are_not_cut_off():
    """In the fifth step in a row: another value starts the count again."""
    check, spreads = HealthCheck(), [0.0] * 4 + [0.1] + [0.0] * 4
    assert [len(check.check({**WELL, "reward/std": spread})) for spread in spreads] == [0] * 9
    (text,) = check.check({**WELL, "reward/std": 0.0, "group/zero_std": 1.0})
    assert text.startswith("every reward of the last 5 steps") and "task" in text
    check, cut_off = HealthCheck(), {**WELL, "response/truncated": 1.0, "group/zero_std": 1.0, "reward/std": 0.0}
    assert [len(check.check(cut_off)) for _ in range(9)] == [1] + [0] * 8
