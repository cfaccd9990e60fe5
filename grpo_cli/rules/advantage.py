"""Rewards to advantages: one number per kept rollout, shared by all its tokens.

Each function compares a rollout with others of its group. `stats_over` says with which: the `kept` ones (as the code of
PODS does: select first, then normalise) or the whole `group`, unselected ones included. With nothing to compare with
(all rewards equal, or a single rollout) the advantage is exactly 0: no signal, and no rounding error blown up into one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.support.errors import UserError
from grpo_cli.types import AdvantageInputs, Reward, Rollout


def grpo(
    kept_rewards: Float[Tensor, " K"], group_rewards: Float[Tensor, " G"], *, stats_over: str, eps: float
) -> Float[Tensor, " K"]:
    """(r - mean) / (std + eps), with the unbiased standard deviation (DeepSeekMath, arXiv 2402.03300).

    `eps` is 1e-4 in TRL and in the PODS code, 1e-6 in slime and Sparse-RL. Dividing by the deviation gives hard and
    easy prompts, whose rewards vary little, the same weight as the others; see `dr_grpo` for the objection.
    """
    if not eps >= 0:
        raise UserError(f"advantage.eps={eps} must be at least 0: it is added to the deviation that is divided by")
    reference = _reference(kept_rewards, group_rewards, stats_over)
    if not _varies(reference):
        return torch.zeros_like(kept_rewards)
    return (_centred(kept_rewards, reference) / (reference.std(correction=1) + eps)).to(kept_rewards.dtype)


def dr_grpo(
    kept_rewards: Float[Tensor, " K"], group_rewards: Float[Tensor, " G"], *, stats_over: str
) -> Float[Tensor, " K"]:
    """r - mean, undivided (Dr. GRPO, arXiv 2503.20783): no bias towards prompts whose rewards hardly differ.

    The other half of Dr. GRPO, no division by the length, is the loss's `aggregation: constant`.
    """
    reference = _reference(kept_rewards, group_rewards, stats_over)
    if not _varies(reference):
        return torch.zeros_like(kept_rewards)
    return _centred(kept_rewards, reference).to(kept_rewards.dtype)


def rloo(
    kept_rewards: Float[Tensor, " K"], group_rewards: Float[Tensor, " G"], *, stats_over: str
) -> Float[Tensor, " K"]:
    """r minus the mean of the others (REINFORCE leave-one-out, arXiv 2402.14740): a baseline independent of the sample.

    Over `group` the others are the G - 1 of the whole group, itself left out. Computed as N / (N - 1) * (r - mean),
    which is the same number.
    """
    reference = _reference(kept_rewards, group_rewards, stats_over)
    if not _varies(reference):
        return torch.zeros_like(kept_rewards)
    count = len(reference)
    return (_centred(kept_rewards, reference) * (count / (count - 1))).to(kept_rewards.dtype)


def median(
    kept_rewards: Float[Tensor, " K"], group_rewards: Float[Tensor, " G"], *, scale: str, floor: float, stats_over: str
) -> Float[Tensor, " K"]:
    """(r - median) / (scale + floor), for groups of odd size (MC-GRPO, arXiv 2601.22582).

    One rollout is the middle, with an advantage of 0 (`downsample=median` leaves it out). The scale is `std` (unbiased)
    or `mad`, the median distance from the median; `none` does not divide. Where rejections leave an even number, the
    median is the mean of the two in the middle.
    """
    if scale not in ("mad", "std", "none"):
        raise UserError(f"advantage.scale={scale} is unknown: use mad, std or none")
    if not floor > 0:
        raise UserError(f"advantage.floor={floor} must be more than 0: a median distance of 0 is divided by otherwise")
    reference = _reference(kept_rewards, group_rewards, stats_over)
    if not _varies(reference):
        return torch.zeros_like(kept_rewards)
    middle = _median(reference)
    distances = kept_rewards.double() - middle
    if scale != "none":
        spread = reference.std(correction=1) if scale == "std" else _median((reference - middle).abs())
        distances = distances / (spread + floor)
    return distances.to(kept_rewards.dtype)


median.needs_middle = True  # type: ignore[attr-defined]


def novelty(
    kept_rewards: Float[Tensor, " K"],
    group_rewards: Float[Tensor, " G"],
    inputs: AdvantageInputs,
    *,
    stats_over: str,
    eps: float,
    bonus: float,
    cap: float,
) -> Float[Tensor, " K"]:
    """That of `grpo`, and more for right answers that were unlikely in their group (XRPO, arXiv 2510.06672).

    With s the mean log-probability of a rollout's tokens as they were drawn, and its mean over the compared rollouts:
    A + min(bonus * max(0, 1 - exp(s - mean)), cap * A) for a rollout that solved the problem and has A above 0. That
    the cap is relative to A is ours.
    """
    for key, value in (("bonus", bonus), ("cap", cap)):
        if not value >= 0:
            raise UserError(f"advantage.{key}={value} must be at least 0: a right answer is not to lose by being rare")
    advantages = grpo(kept_rewards, group_rewards, stats_over=stats_over, eps=eps).double()
    likely = torch.tensor([_mean_logprob(rollout) for rollout in inputs.group.rollouts]).double()
    solved = torch.tensor([reward.solved for reward in inputs.group.rewards])
    kept = list(inputs.kept)
    compared = likely[kept if stats_over == "kept" else list(inputs.baseline)]
    relative = likely[kept] - compared[~compared.isnan()].mean()
    more = rarity_bonus(advantages, relative, bonus, cap).nan_to_num(0.0)  # one that was given whole is not rare
    return torch.where(solved[kept], advantages + more, advantages).to(kept_rewards.dtype)


def rarity_bonus(
    advantages: Float[Tensor, " K"], relative: Float[Tensor, " K"], bonus: float, cap: float
) -> Float[Tensor, " K"]:
    """min(bonus * max(0, 1 - exp(relative)), cap * advantage), and 0 where the advantage is not above 0."""
    return torch.minimum(bonus * (1 - relative.exp()).clamp(min=0), cap * advantages.clamp(min=0))


def per_part(
    kept_rewards: Float[Tensor, " K"],
    group_rewards: Float[Tensor, " G"],
    inputs: AdvantageInputs,
    *,
    weights: Mapping[str, Any],
    stats_over: str,
    eps: float,
) -> Float[Tensor, " K"]:
    """The weighted sum over the parts of the reward, each (x - mean) / (std + eps) for itself (as LightningRL does), so
    that a part counts by its weight and not by its scale.

    A part weighs what it does in the total, or what `weights` says of it; one that neither names is only logged and
    counts nothing. It is 0 for a rollout that does not have it, or in whose total it is left out. Where nothing is
    known of any part, the total is the only one. A part that does not vary adds nothing.
    """
    for part, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise UserError(f"advantage.weights.{part}={weight} must be a number")
    rewards = inputs.group.rewards
    of_total = _weights_in_total(rewards)
    counted = {**of_total, **weights}
    if not counted or not any(reward.parts for reward in rewards):
        return grpo(kept_rewards, group_rewards, stats_over=stats_over, eps=eps)
    advantages = torch.zeros(len(kept_rewards), dtype=torch.float64)
    for part in sorted(counted):
        values = torch.tensor([_counted(reward, part, of_total) for reward in rewards], dtype=torch.float64)
        kept, baseline = values[list(inputs.kept)], values[list(inputs.baseline)]
        advantages += counted[part] * grpo(kept, baseline, stats_over=stats_over, eps=eps)
    return advantages.to(kept_rewards.dtype)


def _weights_in_total(rewards: Sequence[Reward]) -> dict[str, float]:
    """What each part counts in the totals of a group; 1 each where nobody says so and they add up to them."""
    said = {part: weight for reward in rewards for part, weight in reward.weights.items()}
    if not said and all(math.isclose(sum(reward.parts.values()), reward.total) for reward in rewards):
        return dict.fromkeys((part for reward in rewards for part in reward.parts), 1.0)
    return said


def _counted(reward: Reward, part: str, of_total: Mapping[str, float]) -> float:
    """A part's value; 0 where this rollout's total leaves it out, though those of others in its group do not."""
    left_out = bool(reward.weights) and part in of_total and part not in reward.weights
    return 0.0 if left_out else float(reward.parts.get(part, 0.0))


def _mean_logprob(rollout: Rollout) -> float:
    """Of the tokens that were drawn; NaN if all were given."""
    if not rollout.token_ids:
        return 0.0
    drawn = [logprob for logprob in rollout.sampler_logprobs if not math.isnan(logprob)]
    return sum(drawn) / len(drawn) if drawn else math.nan


def _median(values: Float[Tensor, " G"]) -> Float[Tensor, ""]:
    """The mean of the two in the middle, which are one where their number is odd. (`Tensor.median` is the lower.)"""
    ordered = values.sort().values
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2


def _reference(kept_rewards: Tensor, group_rewards: Tensor, stats_over: str) -> Tensor:
    """The rewards that the statistics are taken over, in float64: rewards may be large and differ by little."""
    if stats_over not in ("kept", "group"):
        raise UserError(f"advantage.stats_over={stats_over} is unknown: use kept or group")
    return (kept_rewards if stats_over == "kept" else group_rewards).double()


def _varies(rewards: Tensor) -> bool:
    """Whether two of the rewards differ. Compared exactly: the deviation of equal rewards need not round to 0."""
    return bool((rewards != rewards[:1]).any())


def _centred(rewards: Tensor, reference: Tensor) -> Tensor:
    return rewards.double() - reference.mean()
