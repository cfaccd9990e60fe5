"""Sample-and-rank (Meena, arXiv 2001.09977): the likeliest of several completions (`search=best`).

    answer    argmax over i = 1..k of the mean of log p(token) over the tokens of completion i

p is the distribution that the tokens were sampled from, at eval.temperature. Ours: the mean in place of the sum, so
that a completion is not preferred for being short; of equal ones the first. No reward is looked at.

Measured: docs/studies.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grpo_cli.experimental.search import Searching, SearchMethod
from grpo_cli.settings import Samples
from grpo_cli.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Best(SearchMethod):
    """The completion of `k` with the largest mean log-probability."""

    k: Samples

    def choose(self, searching: Searching) -> list[Rollout]:
        return [max(row, key=mean_logprob) for row in searching.go_on(searching.begin(self.k))]


def mean_logprob(rollout: Rollout) -> float:
    """Compute the mean over sampled tokens, in nats; observations have none."""
    return float(np.nanmean(rollout.sampler_logprobs))
