"""The learning rate of each update, and the effective number of rollouts, which may lower it, where another policy
sampled them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.settings import OptimSettings, TrainSettings
from grpo_cli.types import Batch


def learning_rate(optim: OptimSettings, step: int, steps: int) -> float:
    """Return the rate of a step's updates (from 0, of `steps`): a linear warm-up, then the schedule down to 0.

    >>> half = OptimSettings(1.0, (0.9, 0.99), 1e-8, 0.0, warmup_steps=2, schedule="linear", max_grad_norm=1.0,
    ...     name="adamw", offload=False, park=False, ess="none", ess_reference=1.0)
    >>> [learning_rate(half, step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    done = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    if optim.schedule == "linear":
        return optim.lr * (1.0 - done)
    if optim.schedule == "cosine":
        return optim.lr * 0.5 * (1.0 + torch.cos(torch.tensor(torch.pi * done)).item())
    return optim.lr


def schedule_of(optim: OptimSettings, train: TrainSettings) -> dict[str, Any]:
    """Return the settings that determine the learning rate, by key: saved in a checkpoint."""
    of_optim = {"optim.lr": optim.lr, "optim.warmup_steps": optim.warmup_steps, "optim.schedule": optim.schedule}
    return {**of_optim, "train.steps": train.steps}


def rate_jump(saved: Mapping[str, Any], optim: OptimSettings, train: TrainSettings, step: int) -> str | None:
    """Return a warning if the rate of a step's updates differs from what a saved `schedule_of` would have given."""
    changed_then = {key.removeprefix("optim."): value for key, value in saved.items() if key.startswith("optim.")}
    then = learning_rate(replace(optim, **changed_then), step, saved["train.steps"])
    now = learning_rate(optim, step, train.steps)
    if now == then:
        return None
    given = schedule_of(optim, train)
    changed = ", ".join(f"{key}={given[key]} (was {value})" for key, value in saved.items() if given[key] != value)
    return (
        f"the learning rate of the next updates is {now:.3g}, and would have been {then:.3g} under the settings that "
        f"this run was saved with: {changed}"
    )


def effective_share(batch: Batch, logprobs: Float[Tensor, "N"]) -> float:
    """Return the effective sample size of a whole update as a share of its rollouts, from 1 / B to 1 (VCPO, arXiv
    2602.17616).

    (sum w)^2 / (B * sum w^2), with w the learner's over the sampler's probability of all the sampled tokens of a
    rollout, not truncated, since this measures the mismatch itself and not what a correction leaves of it. Only
    rollouts with a sampled token that counts are used; without any it is 1. NaN where a log-probability is NaN.
    """
    sampled = batch.sampled_mask
    rows = batch.any(sampled & (batch.weights != 0))
    if not rows.any():
        return 1.0
    log_ratio = logprobs.double() - batch.sampler_logprobs.double()
    of_rows = batch.sums(log_ratio.masked_fill(~sampled, 0.0))[rows]
    weights = (of_rows - of_rows.max()).exp()  # scaling the weights does not change the share
    share = float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))
    return min(share, 1.0)  # in this order a NaN stays one, for the learner's guard against bad steps


def rate_factor(ess: str, share: float, reference: float) -> float:
    """Return what `optim.ess` (sqrt, linear) multiplies the learning rate by: 1 for shares of at least `reference`."""
    part = min(1.0, share / reference)
    return math.sqrt(part) if ess == "sqrt" else part
