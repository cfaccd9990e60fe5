"""Each warning comes when it should, names a key that exists, and does not repeat itself."""

from __future__ import annotations

import math

import pytest

from grpo_cli.tracking.health import HealthCheck

WELL = {
    "reward/mean": 0.5,
    "reward/std": 0.5,
    "response/truncated": 0.25,
    "eval/problems": 20.0,
    "group/zero_std": 0.9,
    "mismatch/ratio_mean": 1.1,
}
ILL = {
    "truncated": ({"response/truncated": 0.44}, "sampling.max_new_tokens"),
    "zero_std": ({"group/zero_std": 0.91}, "sampling.temperature"),
    "few_held_out": ({"eval/problems": 19.0}, "eval.problems"),
    "ratio_low": ({"mismatch/ratio_mean": 0.89}, "correction"),
    "ratio_high": ({"mismatch/ratio_mean": 1.11}, "correction"),
    "ratio_nan": ({"mismatch/ratio_mean": float("nan")}, "correction"),
}


def test_a_run_at_the_edge_of_every_limit_gets_no_warning() -> None:
    check = HealthCheck()
    assert [check.check(WELL) for _ in range(20)] == [[]] * 20


@pytest.mark.parametrize("case", ILL)
def test_a_cause_is_told_once_also_where_it_comes_and_goes(case: str) -> None:
    values, key = ILL[case]
    check = HealthCheck()
    (warning,) = check.check({**WELL, **values})
    assert key in warning and next(iter(values)) in warning
    for metrics in ({**WELL, **values}, {}, WELL, {**WELL, **values}):
        assert check.check(metrics) == []


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("response/truncated", [0.3, 0.59, 0.61, 0.9, 0.3, 0.99], [1, 0, 1, 0, 0, 0]),
        ("group/zero_std", [0.95, 1.0, 0.0, 1.0], [1, 0, 0, 0]),
        ("mismatch/ratio_mean", [1.2, 1.4, 1.5, 1 / 1.5, 5.0, math.inf, math.nan, 0.0], [1, 0, 1, 0, 1, 1, 0, 0]),
        ("off/ess", [0.08, 0.05, 0.04, 0.0, 0.0], [1, 0, 1, 1, 0]),
        ("off/token_share", [0.1, 0.15, 0.2, 0.0, 0.2], [1, 0, 1, 0, 0]),
    ],
)
def test_a_cause_is_told_again_when_it_is_twice_as_bad(name: str, values: list[float], told: list[int]) -> None:
    check = HealthCheck()
    assert [len(check.check({**WELL, name: value})) for value in values] == told


def test_equal_rewards_are_reported_at_the_fifth_step_in_a_row_and_after_twice_as_many() -> None:
    equal, check = {"reward/mean": 0.0, "reward/std": 0.0}, HealthCheck()
    assert [check.check(equal) for _ in range(4)] == [[]] * 4
    assert check.check({**equal, "reward/std": 0.1}) == []  # the row is broken and starts over
    found = [check.check(equal) for _ in range(21)]
    assert [step for step, warnings in enumerate(found, start=1) if warnings] == [5, 10, 20]
    assert "last 5 steps" in found[4][0] and "task" in found[4][0]


def test_what_follows_from_another_cause_is_not_told_beside_it() -> None:
    cut_off = {**WELL, "response/truncated": 1.0, "group/zero_std": 1.0, "reward/std": 0.0}
    check = HealthCheck()
    assert [len(check.check(cut_off)) for _ in range(9)] == [1] + [0] * 8
    check = HealthCheck()
    equal = {**WELL, "reward/std": 0.0}
    assert [len(check.check(equal)) for _ in range(4)] == [0] * 4
    (text,) = check.check({**equal, "group/zero_std": 1.0})
    assert text.startswith("every reward of the last 5 steps")


COLLAPSED = {"policy/entropy": 0.04, "group/zero_std": 0.5, "reward/correct": 0.3, "reward/mean": 0.9}


def after_five_steps(entropy: float, **then: float) -> list[str]:
    """The warnings of a sixth step, as `then` says of what has collapsed."""
    check = HealthCheck()
    assert [check.check({**WELL, **COLLAPSED, "policy/entropy": entropy}) for _ in range(5)] == [[]] * 5
    return check.check({**WELL, **COLLAPSED, **then})


def test_entropy_that_is_gone_before_the_problems_are_solved_is_warned_of() -> None:
    [text] = after_five_steps(0.5)
    assert "policy/entropy is 0.040" in text and "0.500" in text and "optim.lr" in text and "loss.kl_coef" in text


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (0.3, {}),  # more than a tenth is left
        (5.0, {"policy/entropy": 0.05}),
        (0.5, {"group/zero_std": 0.49}),
        (0.5, {"reward/correct": 0.8}),
        (0.5, {"policy/entropy": 0.3}),
    ],
)
def test_entropy_that_is_left_or_has_a_good_reason_to_be_gone_is_not(first: float, then: dict[str, float]) -> None:
    assert after_five_steps(first, **then) == []
