"""Rewards to advantages: one number per kept rollout, shared by all its tokens.

Each function compares a rollout with others of its group. `stats_over` says with which: the `kept` ones (as the code of
PODS does: select first, then normalise) or the whole `group`, unselected ones included. With nothing to compare with
(all rewards equal, or a single rollout) the advantage is exactly 0: no signal, and no rounding error blown up into one.
"""

from __future__ import annotations

from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.support.facts import facts
from grpo_cli.support.ranges import OneOf, Range

StatsOver = Annotated[str, OneOf(("kept", "group"))]
Epsilon = Annotated[float, Range(0, because="it is added to the deviation that is divided by")]


@facts(divides=True)
def grpo(
    kept_rewards: Float[Tensor, " K"], group_rewards: Float[Tensor, " G"], *, stats_over: StatsOver, eps: Epsilon
) -> Float[Tensor, " K"]:
    """(r - mean) / (std + eps), with the unbiased standard deviation (DeepSeekMath, arXiv 2402.03300).

    `eps` is 1e-4 in TRL and in the PODS code, 1e-6 in slime and Sparse-RL. Dividing by the deviation gives hard and
    easy prompts, whose rewards vary little, the same weight as the others; see `dr_grpo` for the objection.
    """
    reference = compared_rewards(kept_rewards, group_rewards, stats_over)
    if not varies(reference):
        return torch.zeros_like(kept_rewards)
    return (centred(kept_rewards, reference) / (reference.std(correction=1) + eps)).to(kept_rewards.dtype)


def compared_rewards(kept_rewards: Tensor, group_rewards: Tensor, stats_over: str) -> Tensor:
    """The rewards that the statistics are taken over, in float64: rewards may be large and differ by little."""
    return (kept_rewards if stats_over == "kept" else group_rewards).double()


def varies(rewards: Tensor) -> bool:
    """Whether two of the rewards differ. Compared exactly: the deviation of equal rewards need not round to 0."""
    return bool((rewards != rewards[:1]).any())


def centred(rewards: Tensor, reference: Tensor) -> Tensor:
    return rewards.double() - reference.mean()
