"""AERO (arXiv 2602.14338): its rounds, its choice and its baseline by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import made
import numpy as np
import pytest
from small import advantages_of, kept_by, scored
from test_collectors import collector, one_step

from grpo_cli.config.instantiate import make


def close(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-7)


# Rounds


def test_rollouts_are_made_two_at_a_time_until_the_first_success_or_the_bound() -> None:
    """Of n = 4, at most 9: p0 is solved at once, p1 by its 6th, p2 by its 9th and last, p3 never."""
    solves = {"p0": 0, "p1": 5, "p2": 8, "p3": 99}
    rule = collector("aero", most=9)
    sizes, bank, metrics = one_step(rule, lambda r: r.sample == solves[r.prompt.id], n=4, prompts=4)
    assert sizes == {"p0": 4, "p1": 6, "p2": 9, "p3": 9}
    asked = [Counter(request.prompt.id for request in requests) for requests in bank.rounds]
    assert asked[1:] == [{"p1": 2, "p2": 2, "p3": 2}, {"p2": 2, "p3": 2}, {"p2": 1, "p3": 1}]
    assert len(bank.judged) == 28 and len({request.seed for request in bank.judged}) == 28, "each is judged once"
    assert metrics["collect/later_rounds"] == pytest.approx(12 / 28) and metrics["collect/unsolved"] == 1.0


# The choice


@pytest.mark.parametrize(
    ("right", "wrong", "k", "expected"),
    [
        (1, 31, 1.0, (1, 1)),
        (2, 30, 1.5, (2, 3)),
        (0, 32, 1.0, (0, 1)),  # as of one right answer
        (12, 20, 1.0, (4, 4)),  # 24 are more than 8: half and half
        (30, 2, 1.0, (6, 2)),
        (32, 0, 1.0, (8, 0)),
    ],
)
def test_all_right_answers_and_some_wrong_ones_are_kept_of_32_at_most_8(right, wrong, k, expected) -> None:
    rule = make("downsample", made.part("downsample", "aero", k=k))
    group = kept_by(rule, scored(*[1.0] * right, *[0.0] * wrong), 8, np.random.default_rng(0))
    assert (group.solved, len(group.rollouts) - group.solved) == expected


# The baseline


def test_the_baseline_is_the_posterior_mean() -> None:
    """2 of 8 right, Beta(1, 1): 3/10. Of the 3 kept, 1 right: 2/5. Beta(1/2, 3/2) and 8: 2.5/10."""
    rewards, kept = [1.0, 1.0, *[0.0] * 6], [0, 6, 7]
    assert advantages_of(made.advantage("beta"), rewards, kept) == close([0.7, -0.3, -0.3])
    assert advantages_of(made.advantage("beta", stats_over="kept"), rewards, kept) == close([0.6, -0.4, -0.4])
    prior = made.advantage("beta", prior_right=0.5, prior_wrong=1.5)
    assert advantages_of(prior, rewards, kept) == close([0.75, -0.25, -0.25])
