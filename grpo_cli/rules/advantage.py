"""A group's rewards to advantages: a number per kept rollout, shared by its tokens, or a number per token.

Each function compares a rollout with others of its group. `stats_over` sets which: the `kept` ones (as the code of
PODS does: select first, then normalise) or the whole `group`, unselected ones included. With nothing to compare with
(all rewards equal, or a single rollout) the advantage is exactly 0: no signal, and no rounding error blown up into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_cli.interfaces import Advantage
from grpo_cli.support.errors import UserError, own_code_unless_ours
from grpo_cli.support.facts import name_of
from grpo_cli.support.ranges import OneOf
from grpo_cli.types import ScoredGroup

StatsOver = Annotated[str, OneOf(("kept", "group"))]
Epsilon = Annotated[float, Field(ge=0)]


def grpo(group: ScoredGroup, kept: Sequence[int], *, stats_over: StatsOver, eps: Epsilon) -> Float[Tensor, " K"]:
    """Compute (r - mean) / (std + eps), with the unbiased standard deviation (DeepSeekMath, arXiv 2402.03300).

    `eps` is 1e-4 in TRL and in the PODS code, 1e-6 in slime and Sparse-RL. Dividing by the deviation gives hard and
    easy prompts, whose rewards vary little, the same weight as the others; see `dr_grpo` for the objection.
    """
    return standardised(*compared(group, kept, stats_over), eps)


def standardised(rewards: Float[Tensor, " K"], reference: Float[Tensor, " R"], eps: float) -> Float[Tensor, " K"]:
    """Return how many deviations of the reference rewards are from their mean; 0 where those are equal."""
    if not varies(reference):
        return torch.zeros_like(rewards)
    return (rewards - reference.mean()) / (reference.std(correction=1) + eps)


def centred(rewards: Float[Tensor, " K"], reference: Float[Tensor, " R"]) -> Float[Tensor, " K"]:
    """Return rewards less the mean of the reference rewards; 0 where those are equal."""
    return rewards - reference.mean() if varies(reference) else torch.zeros_like(rewards)


def compared(
    group: ScoredGroup, kept: Sequence[int], stats_over: str
) -> tuple[Float[Tensor, " K"], Float[Tensor, " R"]]:
    """Return the kept rewards and those that statistics are taken over, in float64: they may be large and differ by
    little."""
    of_group = torch.tensor(group.totals)
    of_kept = of_group[list(kept)]
    return of_kept, of_kept if stats_over == "kept" else of_group


def varies(rewards: Tensor) -> bool:
    """True if two of the rewards differ. Compared exactly: the deviation of equal rewards need not round to 0."""
    return bool((rewards != rewards[:1]).any())


def advantages(rule: Advantage, group: ScoredGroup, kept: Sequence[int]) -> Float[Tensor, "K *T"]:
    """Return the rule's advantages, in float32. UserError for another shape than `interfaces.Advantage` has,
    or if not finite."""
    shapes = (len(kept),), (len(kept), max(len(group.rollouts[index]) for index in kept))
    fault = f"advantage {name_of(rule)} returned"
    with own_code_unless_ours(fault.removesuffix(" returned"), getattr(rule, "func", rule)):
        answer = rule(group, kept)
    if not isinstance(answer, Tensor) or answer.shape not in shapes or answer.is_complex():
        found = f"shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else f"{answer!r:.40}"
        raise UserError(f"{fault} {found}: return a tensor of shape {shapes[0]} or {shapes[1]}")
    if not answer.isfinite().all():
        raise UserError(f"{fault} NaN or infinity for prompt {group.prompt.id}: check what it divides by")
    return answer.detach().float()
