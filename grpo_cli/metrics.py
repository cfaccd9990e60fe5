"""Metrics computed from values. Nothing is stored or sent here: the trainer merges these dictionaries into a record."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_cli.metric_names import METRICS
from grpo_cli.support.errors import UserError
from grpo_cli.types import GIVEN, Batch, Finish, Rollout, ScoredGroup


def rollout_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Compute metrics of all the step's rollouts, before selection. A step without rollouts has no means."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {"group/mixed": 0.0}
    lengths = [len(rollout) for rollout in rollouts]
    totals = np.concatenate([group.totals for group in groups])
    return {
        "reward/mean": float(totals.mean()),
        # The floating-point deviation of equal numbers need not be 0: that of (0.1, 0.1, 0.1) is 1.4e-17.
        "reward/std": float(totals.std()) if (totals != totals[0]).any() else 0.0,
        **_part_means(groups),
        "group/zero_std": zero_std_share(groups),
        "group/mixed": float(sum(group.rewards_differ for group in groups)),
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated": sum(rollout.finish is Finish.LENGTH for rollout in rollouts) / len(rollouts),
    }


def turn_metrics(episodes: Sequence[Rollout]) -> dict[str, float]:
    """Return metrics of episodes of several turns that have ended in the step."""
    if not episodes:
        return {}
    return {
        "turns/mean": sum(len(episode.turns) for episode in episodes) / len(episodes),
        "tokens/environment": float(sum(len(episode) - episode.num_sampled for episode in episodes)),
    }


def kept_metrics(chosen: Sequence[ScoredGroup], trained: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return metrics of the rollouts that were chosen, and of those that are trained on. Means over no rollouts are
    left out."""
    totals = np.concatenate([np.zeros(0), *(group.totals for group in trained)])
    found = {"reward/kept_mean": float(totals.mean())} if len(totals) else {}
    comparable = any(len(one.totals) > 1 for one in chosen)
    return found | ({"group/zero_std_kept": zero_std_share(chosen)} if comparable else {})


def reuse_metrics(batch: Batch) -> dict[str, float]:
    """Measure how much of what is trained on is old or was given. Lags are in updates, over sampled tokens. Empty if
    everything in the step is new."""
    if batch.token_ages is None:
        return {}
    trained = batch.trained_mask
    ages = batch.token_ages.clamp(min=0) * trained
    tokens, given = int(trained.sum()), int((trained & (batch.token_ages == GIVEN)).sum())
    return {
        "off/token_share": int((ages > 0).sum()) / max(tokens, 1),
        "off/lag_mean": int(ages.sum()) / max(tokens - given, 1),
        "off/given_share": given / max(tokens, 1),
    }


def zero_std_share(groups: Sequence[ScoredGroup]) -> float:
    """Return the share of the groups whose rewards are all exactly equal; groups of fewer than two do not count.

    Equality and not a small standard deviation: a group of equal rewards has an advantage of exactly 0, and one of
    nearly equal rewards, once divided by its deviation, does not.
    """
    filled = [group for group in groups if len(group.rollouts) > 1]
    return sum(not group.rewards_differ for group in filled) / len(filled) if filled else 0.0


def _part_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for group in groups:
        for reward in group.rewards:
            for part, value in reward.parts.items():
                values.setdefault(part, []).append(value)
    for part in values:
        if f"reward/{part}" in METRICS:
            raise UserError(f"a reward part cannot be called {part!r}: reward/{part} is a metric already; rename it")
    return {f"reward/{part}": sum(items) / len(items) for part, items in values.items()}
