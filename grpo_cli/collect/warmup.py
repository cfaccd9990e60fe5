"""SFT warm-up (`train.warmup=sft`): the first steps of a run imitate demonstrations, until there is a completion to
reward.

Which ones a step takes is a function of the seed and its number, and so the same in a run that was resumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from torch import Tensor

from grpo_cli.collect.requests import seed_of
from grpo_cli.types import Batch, LossOutput, Reward, Rollout, ScoredGroup, Totals


@dataclass(frozen=True)
class Sft:
    """`shown` in an order of its own in each epoch, `per_step` at a time; `rate` is the learning rate (None: that of
    other steps)."""

    steps: int
    rate: float | None
    shown: tuple[Rollout, ...]
    per_step: int
    seed: int

    def groups(self, step: int) -> list[ScoredGroup]:
        """Return the demonstrations of step `step` (from 0)."""
        size, places = len(self.shown), range(step * self.per_step, (step + 1) * self.per_step)
        rollouts = [self.shown[_order(self.seed, place // size, size)[place % size]] for place in places]
        return [ScoredGroup(one.request.prompt, (one,), (Reward(1.0),)) for one in rollouts]

    def loss(self, logprobs: Float[Tensor, "N"], batch: Batch, totals: Totals) -> LossOutput:
        """Compute the mean negative log-likelihood of the demonstrated tokens."""
        said = logprobs.float().masked_fill(~batch.loss_mask, 0.0) * batch.weights
        loss = -said.sum() / max(totals.tokens, 1)
        return LossOutput(loss, {"warmup/loss": loss.detach()})


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed_of(seed, "warmup", epoch)).permutation(size)
