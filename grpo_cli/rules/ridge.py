"""A linear function of what was read in a model, fitted in closed form: the same rows give the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float

from grpo_cli.history import of_kind
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import Others

_ARRAYS = ("features", "targets", "predicted")
WIDTH = 256  # directions of wider states that are used, so that a fit takes some 20 milliseconds whatever their width


def narrowed(states: Float[np.ndarray, "N H"]) -> Float[np.ndarray, "N F"]:
    """At most `WIDTH` directions of them, fixed random ones where they are wider."""
    if states.shape[1] <= WIDTH:
        return states
    # Drawn in float64 from a fixed seed, so every run and every resumed run has the same directions.
    directions = np.random.default_rng(0).standard_normal((states.shape[1], WIDTH))
    return states @ directions / states.shape[1] ** 0.5


@dataclass(frozen=True)
class RidgeHead:
    """A linear function of standardised features."""

    centre: Float[np.ndarray, "F"]
    scale: Float[np.ndarray, "F"]
    weights: Float[np.ndarray, "F"]
    offset: float

    def __call__(self, features: Float[np.ndarray, "R F"]) -> Float[np.ndarray, "R"]:
        return (features - self.centre) / self.scale @ self.weights + self.offset


def fit_ridge(
    features: Float[np.ndarray, "N F"], targets: Float[np.ndarray, "N"], shrinkages: Float[np.ndarray, "S"]
) -> RidgeHead:
    """Ridge regression whose shrinkage (a share of N) has the least generalised cross-validation error.

    Golub, Heath and Wahba 1979: residual sum / (1 - degrees of freedom / N) ** 2, from one eigendecomposition.
    """
    count = len(targets)
    centre, spread = features.mean(axis=0), features.std(axis=0)
    scale = np.where(spread > 1e-9 * np.maximum(1.0, np.abs(centre)), spread, np.inf)  # a constant feature is ignored
    standard = (features - centre) / scale
    offset = float(targets.mean())
    values, vectors = np.linalg.eigh(standard.T @ standard)
    values = np.maximum(values, 0.0)
    projected = vectors.T @ (standard.T @ (targets - offset))
    total = float(((targets - offset) ** 2).sum())
    errors = []
    for shrinkage in shrinkages * count:
        explained = (projected**2 * (values + 2 * shrinkage) / (values + shrinkage) ** 2).sum()
        freedom = 1 + (values / (values + shrinkage)).sum()
        errors.append(max(total - explained, 0.0) / max(1 - freedom / count, 1e-9) ** 2)
    best = count * shrinkages[int(np.argmin(errors))]
    return RidgeHead(centre, scale, vectors @ (projected / (values + best)), offset)


@dataclass(frozen=True)
class ProbeRows:
    """Rows of a step: the problem of each, its features, what was true of it, and what was predicted (NaN: nothing)."""

    problems: tuple[str, ...]
    features: Float[np.ndarray, "N F"]
    targets: Float[np.ndarray, "N"]
    predicted: Float[np.ndarray, "N"]

    def take(self, rows: Bool[np.ndarray, "N"]) -> ProbeRows:
        problems = tuple(problem for problem, left in zip(self.problems, rows, strict=True) if left)
        return ProbeRows(problems, self.features[rows], self.targets[rows], self.predicted[rows])


class RidgeProbe:
    """A ridge on the rows of the last `window` steps; it predicts once there are `least` of them. `ridge` is the
    shrinkage, as a share of their number; `layer` says what the features are of."""

    def __init__(self, *, window: int, least: int, ridge: float, layer: int | None) -> None:
        self._window, self._least, self._ridge, self._layer = window, least, np.array([ridge]), layer
        self.steps: tuple[ProbeRows, ...] = ()
        self._head: RidgeHead | None = None

    @property
    def rows(self) -> int:
        return sum(len(step.targets) for step in self.steps)

    def predict(self, features: Float[np.ndarray, "N F"]) -> Float[np.ndarray, "N"]:
        """NaN where there are too few rows yet. UserError if those are of another width."""
        if self.steps and features.shape[1] != self.steps[0].features.shape[1]:
            raise UserError(
                f"the checkpoint's probe has learnt from {self.steps[0].features.shape[1]} features, and this model "
                f"has {features.shape[1]}; resume with the model that it was, or start a new run"
            )
        return np.full(len(features), np.nan) if self._head is None else self._head(features.astype(np.float64))

    def add(self, seen: Sequence[ProbeRows]) -> None:
        """Learn from a step's rows, if there are any."""
        if seen:
            problems = tuple(problem for one in seen for problem in one.problems)
            joined = (np.concatenate([getattr(one, name) for one in seen]) for name in _ARRAYS)
            self.steps = (*self.steps, ProbeRows(problems, *joined))[-self._window :]
            self._fit()

    def forget(self, is_other: Callable[[str], bool]) -> None:
        """Drop the rows of other problems."""
        kept = [step.take(np.array([not is_other(name) for name in step.problems], dtype=bool)) for step in self.steps]
        self.steps = tuple(step for step in kept if step.problems)
        self._fit()

    def _fit(self) -> None:
        self._head = None
        if self.rows >= self._least:
            features, targets = (np.concatenate([getattr(s, name) for s in self.steps]) for name in _ARRAYS[:2])
            self._head = fit_ridge(features.astype(np.float64), targets, self._ridge)

    def state(self) -> dict[str, Any]:
        """Plain values and tensors."""
        steps = [
            {"problems": list(step.problems), **{name: torch.from_numpy(getattr(step, name)) for name in _ARRAYS}}
            for step in self.steps
        ]
        return {"layer": self._layer, "steps": steps}

    def load(self, state: Mapping[str, Any], group: str) -> None:
        """UserError if the features are of another layer than those that the rule of `group` reads."""
        if state["layer"] != self._layer:
            raise UserError(
                f"the checkpoint's probe has learnt from {group}.layer={_shown(state['layer'])}, and this run has "
                f"{group}.layer={_shown(self._layer)}; resume with the same, or start a new run"
            )
        self.steps = tuple(
            ProbeRows(tuple(step["problems"]), *(step[name].numpy() for name in _ARRAYS)) for step in state["steps"]
        )
        self._fit()


class Probing:
    """What rules share that learn a probe, of which their state is made; `kind` is their choice in `group`."""

    group: ClassVar[str]
    kind: ClassVar[str]
    _probe: RidgeProbe

    def forget(self, is_other: Callable[[str], bool]) -> None:
        """As `interfaces.Forgets` has it."""
        self._probe.forget(is_other)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **self._probe.state()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        found = of_kind(state, self.group, self.kind)
        self._probe.load(found, self.group)


def _shown(layer: int | None) -> str:
    return "null" if layer is None else str(layer)


def never_enough(group: str, own: Mapping[str, Any], others: Others) -> Iterator[str]:
    """What is wrong with `min_rollouts`, if a probe's window never has so many."""
    if own["min_rollouts"] > (most := own["window"] * others.n * others.prompts):
        yield (
            f"{group}.min_rollouts={own['min_rollouts']} is more than the {most} rollouts of {group}.window="
            f"{own['window']} steps, so that nothing would ever be predicted: lower it, or raise the window"
        )


def correlation(predicted: Float[np.ndarray, "N"], targets: Float[np.ndarray, "N"]) -> float | None:
    """Pearson's, over the rows with a prediction; None where one of the two does not vary."""
    known = ~np.isnan(predicted)
    pair = predicted[known], targets[known]
    return None if any(len(of) < 2 or (of == of[0]).all() for of in pair) else float(np.corrcoef(*pair)[0, 1])
