"""POISE: the baseline of a rollout is predicted from the model's own states in the other rollouts of its group
(`advantage=probe`, arXiv 2605.07579).

    A_i = r_i - clip(mean over j != i of g(phi_j), 0, 1)
    phi = mean state of the last prompt tokens, of the last response tokens, and of the tokens' entropies the mean, the
          deviation, and the mean of the last quarter;  g: ridge on standardised features, on the steps before this one

A rollout's own states know how it ends, so a baseline made of them would bias the gradient; those of the others, and of
earlier steps' rewards, do not. The paper's text could be read, no code. Ours: layer, ridge and window, 256 fixed random
directions of wider states, `mix`, and the mean of the others' rewards before there are `min_rollouts` rows.

Measured: docs/studies.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.experimental.aero import require_shares
from grpo_cli.experimental.reading import PolicyReading, ProbeRows, Probing, read
from grpo_cli.rules.ridge import narrowed
from grpo_cli.support.ranges import Share
from grpo_cli.types import ScoredGroup


@dataclass(kw_only=True)
class Poise(Probing):
    """Reward minus what a linear probe predicts from what was read in the others (POISE, arXiv 2605.07579)."""

    group, kind = "advantage", "probe"

    mix: Share
    clip: bool
    _now: dict[str, ProbeRows] = field(default_factory=dict, init=False)  # of the step that is under way, by prompt

    def __call__(self, group: ScoredGroup, kept: Sequence[int]) -> Float[Tensor, " K"]:
        """Raise UserError for rewards outside [0, 1], unless predictions may be, too."""
        if self.clip:
            require_shares("advantage=probe with advantage.clip=true", group)
        if len(group.totals) < 2:
            return torch.zeros(len(kept))
        others = _of_others(group.totals)
        features = described(read(self._runtime, group.rollouts, layer=self.layer, tokens=True))
        found = self.predict(features)
        self._now[group.prompt.id] = ProbeRows(features, group.totals.copy(), found)
        if not np.isnan(found).any():
            predicted = _of_others(found).clip(0.0, 1.0) if self.clip else _of_others(found)
            others = (1 - self.mix) * predicted + self.mix * others
        return torch.from_numpy((group.totals - others)[list(kept)])

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        now, self._now = [*self._now.values()], {}
        self.add(now)
        return {"probe/rows": float(self.rows)}


def _of_others(values: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """Return for each the mean of the others."""
    return (values.sum() - values) / (len(values) - 1)


def described(reading: PolicyReading) -> Float[np.ndarray, "G F"]:
    """Return the features of rollouts, in their order."""
    plain = np.array([_of_entropies(own) for own in reading.entropies])
    return np.concatenate([narrowed(reading.features), plain], axis=1).astype(np.float32)


def _of_entropies(own: Float[np.ndarray, " L"]) -> tuple[float, float, float]:
    return (float(own.mean()), float(own.std()), float(own[-ceil(len(own) / 4) :].mean())) if len(own) else (0.0,) * 3
