"""Advantages: worked numbers, what happens with nothing to compare with, and wrong answers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from small import advantages_of, scored

from grpo_cli.methods.dr_grpo import dr_grpo
from grpo_cli.methods.rloo import rloo
from grpo_cli.rules.advantage import advantages, grpo
from grpo_cli.support.errors import UserError

GRPO = partial(grpo, eps=1e-4)
FUNCTIONS = [GRPO, dr_grpo, rloo]


def close(values: list[float]):
    return pytest.approx(values, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("rule", "rewards", "kept", "over", "expected"),
    [
        # mean 2, deviations -2 0 2, sum of squares 8, unbiased variance 4
        (partial(grpo, eps=0.0), [0, 2, 4], [0, 1, 2], "kept", [-1, 0, 1]),
        (partial(grpo, eps=2.0), [0, 2, 4], [0, 1, 2], "kept", [-0.5, 0, 0.5]),
        (partial(grpo, eps=0.0), [0, 100], [0, 1], "kept", [-(0.5**0.5), 0.5**0.5]),  # whatever the gap
        # kept 0 4 of the group 0 4 8: means 2 and 4, unbiased deviations sqrt(8) and 4
        (partial(grpo, eps=0.0), [0, 4, 8], [0, 1], "kept", [-2 / 8**0.5, 2 / 8**0.5]),
        (partial(grpo, eps=0.0), [0, 4, 8], [0, 1], "group", [-1, 0]),
        (dr_grpo, [0, 4, 8], [0, 1], "kept", [-2, 2]),
        (dr_grpo, [0, 4, 8], [0, 1], "group", [-4, 0]),
        # left out: the other kept one; then the mean of the other two of the group
        (rloo, [0, 4, 8], [0, 1], "kept", [-4, 4]),
        (rloo, [0, 4, 8], [1], "kept", [0]),
        (rloo, [0, 4, 8], [0, 1], "group", [-6, 0]),
        (rloo, [0, 4, 8], [2, 0], "group", [6, -6]),  # in the order of the kept
        (dr_grpo, [1e8, 1e8 + 1], [0, 1], "kept", [-0.5, 0.5]),  # small differences between large rewards survive
    ],
)
def test_advantages_by_hand(rule, rewards, kept, over, expected):
    assert advantages_of(rule, rewards, kept, stats_over=over) == close(expected)


@pytest.mark.parametrize("rule", [*FUNCTIONS, partial(grpo, eps=0.0)])
@pytest.mark.parametrize("over", ["kept", "group"])
def test_nothing_to_compare_with_is_exactly_zero(rule, over):
    """0.1 is no binary fraction: the mean of seven of them need not equal it, and 1e-9 / (0 + eps) is no zero."""
    for reward in (0.1, 1e8 + 0.1):
        assert advantages_of(rule, [reward] * 7, range(5), stats_over=over) == [0.0] * 5
    assert advantages_of(rule, [3.0], stats_over=over) == [0.0]
    # but a lone one, or equal ones, may differ from the rest of their group
    found = advantages_of(rule, [1.0, 1.0, 0.0, 0.0], [0, 1], stats_over=over)
    assert all(value == 0 if over == "kept" else value > 0 for value in found)


TOKENS = scored(1.0, 0.0, 1.0, replies=[(1, 2), (1,), (1, 2, 3)])


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (None, "None"),
        (torch.zeros(3), r"shape \(3,\): return .*\(2,\) or \(2, 3\)"),
        (torch.zeros(2, 2), r"shape \(2, 2\)"),
        (torch.tensor([0.0, float("nan")]), "NaN"),
        (torch.full((2, 3), float("inf")), "NaN or infinity"),
    ],
)
def test_what_is_no_advantage_is_refused_with_its_rule_and_group(answer, part):
    def fixed(group, kept):
        return answer

    with pytest.raises(UserError, match=f"advantage .*fixed returned .*{part}"):
        advantages(fixed, TOKENS, [0, 2])
