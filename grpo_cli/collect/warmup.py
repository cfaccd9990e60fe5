"""SFT warm-up (`train.warmup=sft`): the first `train.warmup_steps` steps of a run imitate demonstrations.

The seed and the step's number determine which ones a step takes, so a resumed run takes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from torch import Tensor

from grpo_cli.collect.requests import seed_of
from grpo_cli.interfaces import Warmup
from grpo_cli.types import Batch, LossOutput, Reward, Rollout, ScoredGroup, Totals


def sft(steps: int, rate: float | None, shown: Sequence[Rollout], per_step: int, seed: int) -> Warmup:
    """Return a warm-up on the demonstrations `shown`, in a new order in each epoch, `per_step` at a time."""

    def groups(step: int) -> list[ScoredGroup]:
        size, places = len(shown), range(step * per_step, (step + 1) * per_step)
        rollouts = [shown[_order(seed, place // size, size)[place % size]] for place in places]
        return [ScoredGroup(one.request.prompt, (one,), (Reward(1.0),)) for one in rollouts]

    return Warmup(steps, rate, groups, imitation_loss)


def imitation_loss(logprobs: Float[Tensor, "N"], batch: Batch, totals: Totals) -> LossOutput:
    """Compute the mean negative log-likelihood of the demonstrated tokens."""
    likelihood = logprobs.float().masked_fill(~batch.loss_mask, 0.0) * batch.weights
    loss = -likelihood.sum() / max(totals.tokens, 1)
    return LossOutput(loss, {"warmup/loss": loss.detach()})


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed_of(seed, "warmup", epoch)).permutation(size)
