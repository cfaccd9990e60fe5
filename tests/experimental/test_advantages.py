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
from grpo_cli.types import Reward


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
    for short, times in ((1.0, [2, 0, 0, -2]), (0.5, [1.5, 0.5, -0.5, -1.5]), (0.0, [1, 1, -1, -1])):
        found = advantages_of(per_part, rewards, weights={"short": short})
        assert found == pytest.approx([high * time for time in times], abs=1e-6)
