"""Particle filtering (arXiv 2502.01618): completions that are chosen again as they grow together (`search=particle`).

    grow      each unfinished particle by at most `every` tokens, sampled from p
    weigh     w_i = p(the tokens just sampled)^(alpha - 1); 1 if it had ended before
    choose    as many particles again, each with a chance of w_i / sum of w, by systematic resampling
    answer    when all have ended, one of them, each alike

The paper weighs and answers by a process reward model. Ours: the weights, by which the answer of many particles is a
draw from p^alpha over whole completions (arXiv 2510.14901), steps of equal length, and the choice. One particle is
plain sampling, bit for bit. A copy continues with the random stream of the particle whose place it takes.

Measured: docs/studies.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from grpo_cli.experimental.search import Searching, SearchMethod
from grpo_cli.settings import Samples
from grpo_cli.support.facts import facts
from grpo_cli.support.ranges import Count
from grpo_cli.types import Rollout


@facts(resumes=True, one_turn=True)
@dataclass(frozen=True, kw_only=True)
class Particle(SearchMethod):
    """`particles` completions to a prompt, of which those with small weights are replaced by copies of the others."""

    particles: Samples
    alpha: Annotated[float, Field(ge=1, le=100)]
    every: Count

    def choose(self, searching: Searching) -> list[Rollout]:
        rngs = [searching.rng(prompt) for prompt in searching.prompts]
        # One particle is never chosen against another, and in one piece its log-probabilities have the same bits too.
        every = self.every if self.particles > 1 else None
        clouds = searching.begin(self.particles)
        while any(one.is_partial for cloud in clouds for one in cloud):
            moved = zip(clouds, searching.go_on(clouds, every), rngs, strict=True)
            clouds = [self._chosen(before, cloud, rng) for before, cloud, rng in moved]
        return [cloud[rng.integers(len(cloud))] for cloud, rng in zip(clouds, rngs, strict=True)]

    def _chosen(self, before: Sequence[Rollout], cloud: Sequence[Rollout], rng: np.random.Generator) -> list[Rollout]:
        drawn = [sum(new.sampler_logprobs[len(old) :]) for old, new in zip(before, cloud, strict=True)]
        places = resampled((self.alpha - 1) * np.array(drawn), rng.random())
        return [replace(cloud[place], request=own.request) for place, own in zip(places, cloud, strict=True)]


def resampled(log_weights: np.ndarray, u: float) -> list[int]:
    """Return as many places as there are log-weights, in order, each as often as its share, rounded by `u` in
    [0, 1).

    >>> resampled(np.log([4.0, 1.0, 1.0]), 0.3)
    [0, 0, 1]
    """
    count = len(log_weights)
    ends = np.cumsum(np.exp(log_weights - log_weights.max()))
    places = np.searchsorted(ends / ends[-1], (np.arange(count) + u) / count, side="right")
    return [int(place) for place in np.minimum(places, count - 1)]
