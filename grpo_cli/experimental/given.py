"""Rollouts whose first tokens are copied, not sampled, so that corrections leave them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from grpo_cli.collect.requests import seed_of
from grpo_cli.types import GIVEN, Finish, Request, Rollout, Span


def begun_with(request: Request, tokens: Sequence[int], sample: int, *names: object) -> Rollout:
    """Return a partial rollout of a prompt's request that begins with the tokens, with a random stream of its own."""
    own = replace(request, sample=sample, seed=seed_of(request.seed, *names, sample))
    spans = (Span(GIVEN, len(tokens)),)
    return Rollout(own, tuple(tokens), (math.nan,) * len(tokens), Finish.PARTIAL, spans)


def num_given(rollout: Rollout) -> int:
    """Return how many of its first tokens were given."""
    return rollout.spans[0].count if rollout.spans and rollout.spans[0].version == GIVEN else 0
