"""The counters of a run, and the metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_cli.learner.learner import Update
from grpo_cli.metrics import kept_metrics, rollout_metrics
from grpo_cli.select import Selection
from grpo_cli.types import Batch, EngineStats, ScoredGroup


@dataclass
class Progress:
    """The counters of a run, saved in its checkpoints."""

    step: int = 0
    updates: int = 0  # those of finished steps
    train_seconds: float = 0.0
    generated_tokens: int = 0
    trained_tokens: int = 0
    generated_rollouts: int = 0
    trained_rollouts: int = 0
    skipped_updates: int = 0
    empty_steps: int = 0
    bad_in_a_row: int = 0
    first_accuracy: float | None = None  # None before the first evaluation
    final_accuracy: float | None = None
    final_accuracy_step: int | None = None  # of the last evaluation


@dataclass(frozen=True)
class TrainedStep:
    """The rollouts that a step trained on, marked in `selected`, the number of trained tokens, and metrics of what they
    were sampled by."""

    updates: tuple[Update, ...]
    selected: Sequence[Selection]
    tokens: int
    sampled: Mapping[str, float]


# Counters as metrics, by their names in `metric_names.py`.
_COUNTERS = {"optim/skipped_updates": "skipped_updates", "optim/empty_steps": "empty_steps"}
_COUNTERS |= {"tokens/generated": "generated_tokens", "tokens/trained": "trained_tokens"}
_COUNTERS |= {"rollouts/generated": "generated_rollouts", "rollouts/trained": "trained_rollouts"}
_COUNTERS |= {"clock/train_seconds": "train_seconds"}
_OF_ENGINE = ("decode_steps", "slots", "slot_utilisation", "kv_peak_bytes", "prefill_tokens")


def warmup_metrics(progress: Progress, updates: Sequence[Update], batch: Batch) -> dict[str, float]:
    """Return the metrics of a step that imitates: nothing was generated."""
    progress.trained_tokens += int(batch.trained_mask.sum())
    progress.trained_rollouts += len(batch)
    return _means(updates) | {name: float(getattr(progress, counter)) for name, counter in _COUNTERS.items()}


def _means(updates: Sequence[Update]) -> dict[str, float]:
    """Return the means of the metrics of updates that were no fault."""
    good = [update.metrics for update in updates if update.fault is None]
    names = dict.fromkeys(name for metrics in good for name in metrics)
    return {name: float(np.mean([metrics[name] for metrics in good if name in metrics])) for name in names}


def step_metrics(
    progress: Progress, scored: Sequence[ScoredGroup], stats: EngineStats, trained: TrainedStep
) -> dict[str, float]:
    """Add a step to the counters; returns its metrics, counters included, by their names in `metric_names.py`."""
    progress.generated_tokens += stats.generated_tokens
    progress.trained_tokens += trained.tokens
    progress.generated_rollouts += sum(len(group.rollouts) for group in scored)
    progress.trained_rollouts += sum(selection.reasons.count("") for selection in trained.selected)
    chosen = [one.group.take(one.indices) for one in trained.selected]
    kept = [one.group.take([i for i, why in enumerate(one.reasons) if not why]) for one in trained.selected]
    metrics = {
        **rollout_metrics(scored),
        **kept_metrics(chosen, kept),
        **_means(trained.updates),
        **trained.sampled,
        **stats.details,
        **{name: getattr(progress, counter) for name, counter in _COUNTERS.items()},
        **{f"engine/{name}": getattr(stats, name) for name in _OF_ENGINE},
    }
    return {name: float(value) for name, value in metrics.items()}
