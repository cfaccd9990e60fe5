"""Held-out accuracy along a run: single curves, their mean over runs, and where they reach an accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

Rows = Sequence[Mapping[str, float | int]]  # of a run's metrics.jsonl

GREEDY = "eval/accuracy"

# What accuracy is drawn against besides steps: the metric, and what a person calls it.
CLOCK = "clock/train_seconds"
AXES = {
    CLOCK: "training seconds",
    "tokens/generated": "generated tokens",
    "tokens/trained": "trained tokens",
}


def spoken(metric: str) -> str:
    """An accuracy as a person calls it."""
    return "greedy accuracy" if metric == GREEDY else f"{metric.removeprefix('eval/')} of samples"


@dataclass(frozen=True)
class Curve:
    """Held-out accuracy of one run at each of its evaluations, and where on each axis of AXES that was."""

    steps: tuple[int, ...]
    accuracy: tuple[float, ...]
    axes: Mapping[str, tuple[float, ...]]

    def along(self, axis: str) -> tuple[float, ...]:
        """Where the evaluations stand on an axis of AXES, or in "step"s."""
        return tuple(map(float, self.steps)) if axis == "step" else self.axes[axis]

    def first_reaching(self, accuracy: float, axis: str = CLOCK) -> float | None:
        """Where the first evaluation of at least this accuracy stands, None if there is none."""
        return next((x for x, y in zip(self.along(axis), self.accuracy, strict=True) if y >= accuracy), None)


def curve_of(rows: Rows, metric: str = GREEDY) -> Curve:
    """The evaluations among the rows; an accuracy that is no finite number is none."""
    evaluated = [row for row in rows if math.isfinite(row.get(metric, math.nan))]
    return Curve(
        steps=tuple(int(row["step"]) for row in evaluated),
        accuracy=tuple(row[metric] for row in evaluated),
        # Before the first step there is no clock and there are no tokens.
        axes={axis: tuple(row.get(axis, math.nan) if row["step"] else 0.0 for row in evaluated) for axis in AXES},
    )


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean over runs at each step: of accuracy, and of where it stands on each axis.

    Runs that are evaluated at different steps are interpolated linearly between their evaluations; only steps that
    all of them cover are taken, so that no run enters or leaves the mean on the way. No steps if there are none such.
    """
    steps, accuracy = at_common_steps(curves)
    if not steps:
        return Curve((), (), {axis: () for axis in AXES})
    axes = {axis: _interpolated(curves, steps, [curve.axes[axis] for curve in curves]) for axis in AXES}
    return Curve(
        steps=tuple(steps),
        accuracy=tuple(accuracy.mean(axis=0).tolist()),
        axes={axis: tuple(values.mean(axis=0).tolist()) for axis, values in axes.items()},
    )


def deviation(curves: Sequence[Curve]) -> Float[np.ndarray, " steps"]:
    """Standard deviation over runs at each step of `mean_curve`; 0 of one run alone."""
    _, accuracy = at_common_steps(curves)
    return accuracy.std(axis=0, ddof=1 if len(curves) > 1 else 0)


def at_common_steps(curves: Sequence[Curve]) -> tuple[list[int], Float[np.ndarray, "runs steps"]]:
    """The steps at which any of the runs is evaluated, as far as all cover them, and every run's accuracy there."""
    if not curves or not all(curve.steps for curve in curves):
        return [], np.zeros((len(curves), 0))
    first, last = max(curve.steps[0] for curve in curves), min(curve.steps[-1] for curve in curves)
    steps = sorted({step for curve in curves for step in curve.steps if first <= step <= last})
    return steps, _interpolated(curves, steps, [curve.accuracy for curve in curves])


def _interpolated(
    curves: Sequence[Curve], steps: Sequence[int], values: Sequence[Sequence[float]]
) -> Float[np.ndarray, "runs steps"]:
    return np.stack([np.interp(steps, curve.steps, of_run) for curve, of_run in zip(curves, values, strict=True)])
