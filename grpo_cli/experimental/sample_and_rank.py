"""Sample-and-rank (Meena, arXiv 2001.09977): the likeliest of several replies (`search=best`).

    answer    argmax over i = 1..k of the mean of log p(token) over the tokens of reply i

p is what the sampler drew the tokens with, at eval.temperature. Ours: the mean in place of the sum, so that a reply is
not preferred for being short; of equal ones the first. No reward is looked at.

Measured: docs/studies.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from grpo_cli.experimental.search import Searching, SearchMethod
from grpo_cli.settings import MOST_SAMPLES
from grpo_cli.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Best(SearchMethod):
    """Of `k` replies the one with the largest mean log-probability."""

    k: Annotated[int, Field(ge=1, le=MOST_SAMPLES)]

    def choose(self, searching: Searching) -> list[Rollout]:
        return [max(row, key=mean_logprob) for row in searching.go_on(searching.begin(self.k))]


def mean_logprob(rollout: Rollout) -> float:
    """Over the tokens that were drawn, in nats; those that an environment answered have none."""
    return float(np.nanmean(rollout.sampler_logprobs))
