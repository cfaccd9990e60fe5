"""XRPO: a bonus for right answers that were unlikely in their group, rollouts in rounds, each to the prompt whose
solved share it narrows most (arXiv 2510.06672).

    novelty   A + min(bonus * max(0, 1 - exp(s - mean(s))), cap * A)  if solved and A > 0;  s: mean log-probability
    ci        the k-th rollout is worth sqrt(p (1 - p)) (h(k-1) - h(k)) + explore sqrt(ln K / (k-1)),
              h(k) = t_.975 / sqrt(k),  p = (solved + 1) / (tried + 2),  K: rollouts so far in the step

Not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_cli.experimental.apportion import hand_out, in_proportion
from grpo_cli.interfaces import StepRollouts
from grpo_cli.rules.advantage import Epsilon, StatsOver, grpo
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import facts
from grpo_cli.support.intervals import student_95
from grpo_cli.support.ranges import Count
from grpo_cli.types import Rollout, ScoredGroup

NotNegative = Field(ge=0)


@facts(divides=True)
def novelty(
    group: ScoredGroup,
    kept: Sequence[int],
    *,
    stats_over: StatsOver,
    eps: Epsilon,
    bonus: Annotated[float, NotNegative],
    cap: Annotated[float, NotNegative],
) -> Float[Tensor, " K"]:
    """Compute the advantage of `grpo`, and more for right answers that were unlikely in their group, by the
    log-probabilities of the tokens as they were sampled; the mean is over the compared rollouts. That the cap is
    relative to A is ours.
    """
    advantages = grpo(group, kept, stats_over=stats_over, eps=eps)
    likely = torch.tensor([_mean_logprob(rollout) for rollout in group.rollouts]).double()
    solved = torch.tensor([reward.solved for reward in group.rewards])[list(kept)]
    own = likely[list(kept)]
    compared = own if stats_over == "kept" else likely
    relative = own - compared[~compared.isnan()].mean()
    more = rarity_bonus(advantages, relative, bonus, cap).nan_to_num(0.0)  # one that was given whole is not rare
    return torch.where(solved, advantages + more, advantages)


def rarity_bonus(
    advantages: Float[Tensor, " K"], relative: Float[Tensor, " K"], bonus: float, cap: float
) -> Float[Tensor, " K"]:
    """min(bonus * max(0, 1 - exp(relative)), cap * advantage), and 0 where the advantage is not above 0."""
    return torch.minimum(bonus * (1 - relative.exp()).clamp(min=0), cap * advantages.clamp(min=0))


def _mean_logprob(rollout: Rollout) -> float:
    """Return the mean over sampled tokens; NaN if all were given."""
    if not rollout.token_ids:
        return 0.0
    drawn = [logprob for logprob in rollout.sampler_logprobs if not math.isnan(logprob)]
    return sum(drawn) / len(drawn) if drawn else math.nan


@facts(unequal=True)
def ci(
    step: StepRollouts,
    *,
    rounds: Count,
    most: int | None,
    explore: Annotated[float, Field(ge=0)],
) -> list[ScoredGroup]:
    """Make as many rollouts as a plain step, in `rounds` parts; after the first, which all prompts share alike, each
    goes to where it narrows the interval of the solved share most. The deviation is that of (solved + 1) of (tried +
    2), since one answer says nothing of it."""
    n, prompts = step.n, step.prompts
    room = 2 * n if most is None else most
    if room < n:
        raise UserError(
            f"collector.most={room} is less than n={n}, the mean size of a group: take collector.most of {n} or more"
        )
    first = min(n * prompts, max(2 * prompts, n * prompts // rounds))
    groups = step.generate(zip(step.pick(prompts), in_proportion(np.ones(prompts), first, 2, step.rng), strict=True))
    for left in range(rounds - 1, 0, -1):
        have = [len(group.rollouts) for group in groups]
        if part := (n * prompts - sum(have)) // left:
            solved = [group.solved for group in step.score(groups)]
            gains = [_gains(right, tried, sum(have), room, explore) for right, tried in zip(solved, have, strict=True)]
            counts = hand_out(gains, have, part, step.rng)
            groups = step.generate((g.prompt, new - old) for g, new, old in zip(groups, counts, have, strict=True))
    return step.score(groups)


def _gains(solved: int, tried: int, made: int, most: int, explore: float) -> list[float]:
    """Return what a prompt's k-th rollout is worth, for k up to `most`; 0 for those that it has."""
    share = (solved + 1) / (tried + 2)
    deviation = math.sqrt(share * (1 - share))
    worth = [
        deviation * narrowing(k - 1) + explore * math.sqrt(math.log(made) / (k - 1)) for k in range(tried + 1, most + 1)
    ]
    return [0.0] * (min(tried, most) + 1) + worth


@cache
def narrowing(count: int) -> float:
    """Compute how much one more than `count` answers (2 or more) of deviation 1 narrows half the 95 % interval of their
    mean, t_{.975} / sqrt(count)."""
    return _half_width(count) - _half_width(count + 1)


def _half_width(count: int) -> float:
    return student_95(count - 1) / math.sqrt(count)
