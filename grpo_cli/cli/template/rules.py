"""The choice of completions to train on: conf/downsample/outer.yaml names `outer`."""

import numpy as np

from grpo_cli.types import ScoredGroup


def outer(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """`keep` of the group's replies, as indices: the best half and the worst half. Draw from `rng` alone."""
    order = sorted(range(len(group.rollouts)), key=lambda i: group.rewards[i].total)
    best = keep // 2
    return order[: keep - best] + order[len(order) - best :]
