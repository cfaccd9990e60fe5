"""A ridge that learns online from what was read in rollouts (`reading.py`), and the state of a rule that has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field

from grpo_cli.history import of_kind
from grpo_cli.interfaces import Runtime
from grpo_cli.rules.ridge import RidgeHead, fit_ridge
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import Count


class ProbeRows(NamedTuple):
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
            joined = ProbeRows(*map(np.concatenate, zip(*seen, strict=True)))
            self.steps = (*self.steps, joined)[-self._window :]
            self.fit()

    def fit(self) -> None:
        self._head = None
        if self.rows >= self._least:
            features, targets, _ = map(np.concatenate, zip(*self.steps, strict=True))
            self._head = fit_ridge(features.astype(np.float64), targets, self._ridge)


@dataclass(kw_only=True)
class Probing:
    """A rule that learns a probe, of which its state is made; `kind` is its choice in `group`. UserError if `window`
    steps have fewer than `min_rollouts` rollouts, `n` of each of `prompts`."""

    group: ClassVar[str]
    kind: ClassVar[str]
    ridge: Annotated[float, Field(gt=0)]
    window: Count
    min_rollouts: Annotated[int, Field(ge=2)]
    layer: Count | None
    n: int
    prompts: int

    def __post_init__(self) -> None:
        most = self.window * self.n * self.prompts
        if self.min_rollouts > most:
            raise UserError(
                f"{self.group}.min_rollouts={self.min_rollouts} is more than the {most} rollouts of "
                f"{self.group}.window={self.window} steps: lower it, or raise the window"
            )
        self._probe = RidgeProbe(window=self.window, least=self.min_rollouts, ridge=self.ridge)

    def setup(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def state_dict(self) -> dict[str, Any]:
        steps = [{name: torch.from_numpy(own) for name, own in step._asdict().items()} for step in self._probe.steps]
        return {"kind": self.kind, "layer": self.layer, "steps": steps}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Put back a state. UserError if its features are of another layer than the rule reads."""
        found = of_kind(state, self.group, self.kind)
        if found["layer"] != self.layer:
            before = "null" if found["layer"] is None else found["layer"]
            raise UserError(f"the checkpoint's probe has learnt from {self.group}.layer={before}: resume with that")
        steps = ({name: own.numpy() for name, own in step.items()} for step in found["steps"])
        self._probe.steps = tuple(ProbeRows(**step) for step in steps)
        self._probe.fit()
