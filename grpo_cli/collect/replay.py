"""No replay: a step trains only on its own groups (stores are in `methods/`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_cli.types import ScoredGroup


class NoReplay:
    """Every group of a step is made in it."""

    def fresh(self, prompts: int, version: int) -> int:
        return prompts

    def draw(
        self, count: int, fresh: Sequence[ScoredGroup], version: int, rng: np.random.Generator
    ) -> Sequence[ScoredGroup]:
        return fresh
