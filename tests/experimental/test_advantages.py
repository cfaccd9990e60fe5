"""The median and parts of a reward: worked numbers, and the definition in plain Python."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import made
import numpy as np
import pytest
from small import advantages_of, scored

from grpo_cli.experimental import lightning_rl, mc_grpo
from grpo_cli.select import select
from grpo_cli.types import Reward, ScoredGroup


def close(values: list[float]):
    return pytest.approx(values, rel=1e-5, abs=1e-7)


def test_the_release_divides_by_the_median_distance_and_leaves_the_middle_rollout_out():
    """Median .2, distances .2 .1 0 .3 .8, of which .2 is in the middle: each over .201."""
    group = scored(*[Reward(total) for total in (0.0, 1.0, 0.2, 0.5, 0.1)])
    release = made.advantage("median", scale="mad")
    found = select(group, [""] * 5, 4, mc_grpo.all_but_the_middle, release, np.random.default_rng(0), True)
    assert found.indices == (0, 1, 3, 4)
    assert found.advantages.tolist() == pytest.approx([-0.995025, 3.980100, 1.492537, -0.497512], abs=1e-5)
    # by the deviation, of which the variance is (.36^2 + .26^2 + .16^2 + .14^2 + .64^2) / 4 = .163
    by_deviation = advantages_of(made.advantage("median"), [0.0, 0.1, 0.2, 0.5, 1.0])
    assert by_deviation[4] == pytest.approx(0.8 / (0.163**0.5 + 0.001))
    # of 0/1 rewards only the floor is left
    thirds = scored(*[Reward(total) for total in (0.0, 1.0, 0.0)])
    found = select(thirds, [""] * 3, 2, mc_grpo.all_but_the_middle, release, np.random.default_rng(0), True)
    assert sorted(found.advantages.tolist()) == pytest.approx([0.0, 1000.0])


def asked(function, group: ScoredGroup, kept: list[int] | None = None, **words) -> list[float]:
    """Of the kept rollouts; all count."""
    return function(group, range(len(group.rollouts)) if kept is None else kept, **words).tolist()


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
