"""Metrics over a run: single curves, their mean over runs, and where they reach an accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from grpo_cli.support.intervals import student_95

GREEDY = "eval/accuracy"

# What accuracy is plotted against: the metric and its label.
CLOCK = "clock/train_seconds"
AXES = {CLOCK: "training seconds", "tokens/generated": "generated tokens", "step": "steps"}

# What else is drawn by step.
SERIES = {"reward/mean": "reward", "response/length_mean": "completion length", "policy/entropy": "entropy"}
SERIES |= {"loss/kl": "KL to the reference"}


def accuracy_label(metric: str) -> str:
    """Return the label of an accuracy metric."""
    return "greedy accuracy" if metric == GREEDY else f"{metric.removeprefix('eval/')} of samples"


@dataclass(frozen=True)
class Curve:
    """A metric of one run at each step that has it, and the positions of these steps on each axis of AXES."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    axes: Mapping[str, tuple[float, ...]]
    intervals: tuple[tuple[float, float], ...] = ()  # 95%, of an accuracy over the problems; a mean has none

    def first_reaching(self, value: float | None) -> float | None:
        """Return the seconds up to the first step with at least this value, None if there is none."""
        return next((x for x, y in zip(self.axes[CLOCK], self.values, strict=True) if value and y >= value), None)


def curve_of(rows: Sequence[Mapping[str, float | int]], metric: str = GREEDY) -> Curve:
    """Return the metric in the rows of a `metrics.jsonl`; a value that is not finite is skipped."""
    found = [row for row in rows if math.isfinite(row.get(metric, math.nan))]
    return Curve(
        steps=tuple(int(row["step"]) for row in found),
        values=tuple(row[metric] for row in found),
        # Before the first step clock and tokens are 0.
        axes={axis: tuple(float(row.get(axis, math.nan)) if row["step"] else 0.0 for row in found) for axis in AXES},
        intervals=tuple((row.get(f"{metric}_low", math.nan), row.get(f"{metric}_high", math.nan)) for row in found),
    )


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean over runs at each step, of the metric and of the position on each axis.

    Runs evaluated at different steps are interpolated linearly between their evaluations; only steps that all of them
    cover are used, so that no run enters or leaves the mean on the way. Empty if there are none.
    """
    steps = _common_steps(curves)

    def mean(values: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(_at(steps, curves, values).mean(axis=0).tolist()) if steps else ()

    axes = {axis: mean([curve.axes[axis] for curve in curves]) for axis in AXES}
    return Curve(tuple(steps), mean([curve.values for curve in curves]), axes)


def interval(curves: Sequence[Curve]) -> Float[np.ndarray, "2 steps"]:
    """Return both ends of the 95% interval over two or more runs at each step of `mean_curve`."""
    values = _at(_common_steps(curves), curves, [curve.values for curve in curves])
    half = student_95(len(curves) - 1) * values.std(axis=0, ddof=1) / math.sqrt(len(curves))
    return values.mean(axis=0) + np.array([-half, half])


def _common_steps(curves: Sequence[Curve]) -> list[int]:
    """Return the steps at which any run is evaluated within the range that all cover."""
    if not curves or not all(curve.steps for curve in curves):
        return []
    first, last = max(curve.steps[0] for curve in curves), min(curve.steps[-1] for curve in curves)
    return sorted({step for curve in curves for step in curve.steps if first <= step <= last})


def _at(
    steps: Sequence[int], curves: Sequence[Curve], values: Sequence[Sequence[float]]
) -> Float[np.ndarray, "runs steps"]:
    return np.stack([np.interp(steps, curve.steps, of_run) for curve, of_run in zip(curves, values, strict=True)])
