"""Rules of a group of completions: conf/downsample/outer.yaml names `outer`, conf/advantage/centred.yaml `centred`."""

from collections.abc import Sequence

import numpy as np
import torch

from grpo_cli.types import ScoredGroup


def outer(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """`keep` of the group's replies, as indices: the best half and the worst half. Draw from `rng` alone."""
    order = sorted(range(len(group.rollouts)), key=lambda i: group.rewards[i].total)
    best = keep // 2
    return order[: keep - best] + order[len(order) - best :]


def centred(group: ScoredGroup, kept: Sequence[int]) -> torch.Tensor:
    """Return how much each of the `kept` replies is better than the group's mean, not divided by the deviation."""
    return torch.tensor(group.totals - group.totals.mean())[list(kept)]
