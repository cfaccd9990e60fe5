"""The arms of a group: rollouts of one problem that read different contexts, or were given a beginning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.support.facts import Others
from grpo_cli.types import AdvantageInputs, Rollout, ScoredGroup


def reward_by_arm(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Mean reward of the rollouts with a hint, and of those without, where there are any."""
    found: dict[str, list[float]] = {"reward_hinted": [], "reward_plain": []}
    for group in groups:
        for one, reward in zip(group.rollouts, group.rewards, strict=True):
            found["reward_plain" if one.unaided else "reward_hinted"].append(reward.total)
    return {figure: float(np.mean(rewards)) for figure, rewards in found.items() if rewards}


def arm(rollout: Rollout) -> tuple[str, bool]:
    """What it is compared with: the same context, and likewise given a beginning or not."""
    return rollout.request.prompt.id, rollout.given > 0


def needs_arms(own: Mapping[str, Any], others: Others) -> Iterator[str]:
    """For an advantage that compares within arms."""
    if not others.says("collector", "arms"):
        yield (
            f"{others.named('advantage')} compares rollouts with the same hint, and {others.named('collector')} gives "
            "none; use collector=hint or collector=nudge (a collector of your own says @facts(arms=True))"
        )


def arm_means(group_rewards: Float[Tensor, " G"], inputs: AdvantageInputs) -> dict[tuple[str, bool], Tensor]:
    """The mean reward of each arm of the group."""
    found: dict[tuple[str, bool], list[Tensor]] = {}
    for place, reward in zip(inputs.baseline, group_rewards, strict=True):
        found.setdefault(arm(inputs.group.rollouts[place]), []).append(reward)
    return {name: torch.stack(rewards).mean() for name, rewards in found.items()}
