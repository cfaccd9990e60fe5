"""ADHint (arXiv 2512.13095): the harder a prompt is, the more of a worked solution its later completions begin with.

    d = 1 - solved share of a first round, without hints
    w = clip(least + (most - least) d + noise N(0, 1), 0, most)
    second round: completions that begin with the first floor(w L) tokens of the prompt's solution of L tokens, given
    advantage: r - mean of its own arm, which are the plain completions and those with a hint; given tokens have 0 where
    that is negative, so that a correct hint is never trained against

Read from the paper's text. Ours: one w for all of a prompt's second round, how many completions are in the first, and
all numbers in the YAML. Left out: how the paper weighs its arms, and its modulation of given tokens by entropy.

Measured: docs/studies.md (no difference from equal groups seen; worse than imitating the solutions).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_cli.collect.requests import seed_of
from grpo_cli.experimental.fresh import weighed
from grpo_cli.interfaces import KnowsSolutions, Runtime, StepRollouts, facts
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import Count, Share
from grpo_cli.types import GIVEN, Finish, Group, Request, Rollout, ScoredGroup, Span


@facts(resumes=True)
@dataclass
class Hint:
    """`plain` rollouts of each prompt (None: half of n), then the others with a hint at the beginning of the
    completion. With nothing of a solution they are plain as well. UserError for a task without solutions."""

    plain: Count | None
    least: Share
    most: Annotated[float, Field(gt=0, le=1)]
    noise: Annotated[float, Field(ge=0, le=1)]
    only_unsolved: bool

    def setup(self, runtime: Runtime) -> None:
        if not isinstance(runtime.task, KnowsSolutions) or getattr(runtime.task, "turns", 1) > 1:
            raise UserError("collector=hint needs worked solutions of one turn, and this task has none: leave it out")
        self._task = runtime.task

    def __call__(self, step: StepRollouts) -> list[ScoredGroup]:
        first = step.n // 2 if self.plain is None else self.plain
        if not 1 <= first < step.n:
            raise UserError(f"collector.plain={first} must be from 1 to n - 1={step.n - 1}: lower it, or raise n")
        requests: list[Group | tuple] = []
        shares = []
        for group in step.score(step.generate((prompt, first) for prompt in step.pick(step.prompts))):
            solution, drawn = self._task.solution(group.prompt), self.noise * step.rng.normal()
            wanted = share(1 - group.solved / first, self.least, self.most, drawn)
            most = min(int(wanted * len(solution)), step.sampling.max_new_tokens - 1)
            hint = solution[:most] if not (self.only_unsolved and group.solved) else ()
            shares.append(len(hint) / max(1, len(solution)))
            request = group.rollouts[0].request
            hinted = tuple(begun_with(request, hint, sample, "hint") for sample in range(first, step.n))
            requests.append(Group(group.prompt, hinted) if hint else (group.prompt, step.n - first))
        step.note("hint_share", float(np.mean(shares)))
        return step.score(step.generate(requests))


def begun_with(request: Request, tokens: Sequence[int], sample: int, *names: object) -> Rollout:
    """Return a partial rollout of a prompt's request that begins with the tokens, with a random stream of its own. They
    are copied, not sampled, so that corrections leave them out."""
    own = replace(request, sample=sample, seed=seed_of(request.seed, *names, sample))
    return Rollout(own, tuple(tokens), (math.nan,) * len(tokens), Finish.PARTIAL, (Span(GIVEN, len(tokens)),))


def num_given(rollout: Rollout) -> int:
    """Return how many of its first tokens were given."""
    return rollout.spans[0].count if rollout.spans and rollout.spans[0].version == GIVEN else 0


def share(difficulty: float, least: float, most: float, noise: float = 0.0) -> float:
    """Return how much of a solution is given.

    >>> [share(d, 0.0, 0.8) for d in (0.0, 0.25, 0.5, 1.0)]
    [0.0, 0.2, 0.4, 0.8]
    """
    return min(max(least + (most - least) * difficulty + noise, 0.0), most)


def arms(group: ScoredGroup, kept: Sequence[int]) -> Float[Tensor, "K T"]:
    """Return the reward minus the mean of its own arm; given tokens have none that is negative."""
    given = np.array([num_given(rollout) for rollout in group.rollouts])
    means = {arm: group.totals[(given > 0) == arm].mean() for arm in {bool(count) for count in given}}
    found = [group.totals[index] - means[bool(given[index])] for index in kept]
    weights = [np.ones(len(group.rollouts[index])) for index in kept]
    for own, index, advantage in zip(weights, kept, found, strict=True):
        own[: given[index]] = advantage >= 0
    return weighed(torch.tensor(found), weights)
