"""A ridge that learns online from what was read in rollouts (`reading.py`), and the state of a rule that has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float

from grpo_cli.history import of_kind
from grpo_cli.interfaces import Runtime
from grpo_cli.rules.ridge import RidgeHead, fit_ridge
from grpo_cli.support.errors import UserError

_ARRAYS = ("features", "targets", "predicted")


@dataclass(frozen=True)
class ProbeRows:
    """Rows of a step: features, what was true of each, and what was predicted (NaN: nothing)."""

    features: Float[np.ndarray, "N F"]
    targets: Float[np.ndarray, "N"]
    predicted: Float[np.ndarray, "N"]


class RidgeProbe:
    """A ridge on the rows of the last `window` steps; it predicts once there are `least` of them. `ridge` is the
    shrinkage, as a share of their number."""

    def __init__(self, *, window: int, least: int, ridge: float) -> None:
        self._window, self._least, self._ridge = window, least, np.array([ridge])
        self.steps: tuple[ProbeRows, ...] = ()
        self._head: RidgeHead | None = None

    @property
    def rows(self) -> int:
        return sum(len(step.targets) for step in self.steps)

    def predict(self, features: Float[np.ndarray, "N F"]) -> Float[np.ndarray, "N"]:
        """Return predictions, NaN with too few rows yet."""
        return np.full(len(features), np.nan) if self._head is None else self._head(features.astype(np.float64))

    def add(self, seen: Sequence[ProbeRows]) -> None:
        """Learn from a step's rows, if there are any."""
        if seen:
            joined = (np.concatenate([getattr(one, name) for one in seen]) for name in _ARRAYS)
            self.steps = (*self.steps, ProbeRows(*joined))[-self._window :]
            self.fit()

    def fit(self) -> None:
        self._head = None
        if self.rows >= self._least:
            features, targets = (np.concatenate([getattr(s, name) for s in self.steps]) for name in _ARRAYS[:2])
            self._head = fit_ridge(features.astype(np.float64), targets, self._ridge)


class Probing:
    """A rule that learns a probe, of which its state is made; `kind` is its choice in `group`."""

    group: ClassVar[str]
    kind: ClassVar[str]
    layer: int | None
    _probe: RidgeProbe
    _runtime: Runtime

    def probe(self, window: int, least: int, ridge: float, rollouts: int) -> RidgeProbe:
        """Return the probe. UserError if `window` steps of `rollouts` each have fewer than `least` rollouts."""
        if least > window * rollouts:
            raise UserError(
                f"{self.group}.min_rollouts={least} is more than the {window * rollouts} rollouts of "
                f"{self.group}.window={window} steps: lower it, or raise the window"
            )
        return RidgeProbe(window=window, least=least, ridge=ridge)

    def setup(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def state_dict(self) -> dict[str, Any]:
        steps = [{name: torch.from_numpy(getattr(step, name)) for name in _ARRAYS} for step in self._probe.steps]
        return {"kind": self.kind, "layer": self.layer, "steps": steps}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Put back a state. UserError if its features are of another layer than the rule reads."""
        found = of_kind(state, self.group, self.kind)
        if found["layer"] != self.layer:
            before = "null" if found["layer"] is None else found["layer"]
            raise UserError(f"the checkpoint's probe has learnt from {self.group}.layer={before}: resume with that")
        self._probe.steps = tuple(ProbeRows(*(step[name].numpy() for name in _ARRAYS)) for step in found["steps"])
        self._probe.fit()
