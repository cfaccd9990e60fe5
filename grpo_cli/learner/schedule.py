"""The learning rate of each update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from grpo_cli.settings import OptimSettings, TrainSettings


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
