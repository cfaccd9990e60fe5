"""Advantages of GRPO that weigh single tokens: those that the policy sampled now, or was uncertain of.

    fresh     A for tokens of the current weights and given ones, 0 for older ones (ours; APRIL, arXiv 2509.18521,
              trains on them)
    entropy   A / keep for the `keep` share of the group's kept tokens with the largest entropy, 0 for the others
              (DART-GUI, arXiv 2509.23866, chooses steps of an episode so)
    echo      A (1 + amount S_t), S_t = clip(entropy z(H_t) + doubt z(1 - C_t), -bound, bound) (ECHO, arXiv 2602.02150)

H_t is the entropy of the distribution that token t was sampled from, by a pass over the group before the update, C_t
the chance that it was sampled with, and z the distance from the mean of the group's kept tokens in deviations, where
ECHO's release takes a minibatch's. Weights act on the policy loss alone: a token of weight 0 stays in its divisors and
its KL.

Measured: docs/studies.md (`fresh`: accuracy was lower). The others were not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_cli.experimental.reading import read
from grpo_cli.interfaces import Bench
from grpo_cli.rules.advantage import Epsilon, StatsOver, grpo
from grpo_cli.support.facts import facts
from grpo_cli.types import ENVIRONMENT, GIVEN, Rollout, ScoredGroup


def weighed(advantages: Float[Tensor, " K"], weights: Sequence[Any]) -> Float[Tensor, "K T"]:
    """Return each rollout's advantage times the weights of its tokens."""
    found = torch.zeros(len(weights), max(map(len, weights)), dtype=torch.float64)
    for row, own in enumerate(weights):
        found[row, : len(own)] = advantages[row] * torch.tensor(np.asarray(own), dtype=torch.float64)
    return found


def versions(rollout: Rollout) -> np.ndarray:
    """Return which weights sampled each token."""
    spans = [(span.version, span.count) for span in rollout.spans] or [(0, len(rollout))]
    return np.repeat([version for version, _ in spans], [count for _, count in spans])


@facts(divides=True)
def fresh(group: ScoredGroup, kept: Sequence[int], *, stats_over: StatsOver, eps: Epsilon) -> Float[Tensor, "K T"]:
    """`grpo` for tokens of the newest weights that sampled any of the group, and given ones. A group that was stored
    whole is fresh by that: it goes with collectors that finish groups in the step."""
    own = [versions(group.rollouts[index]) for index in range(len(group.rollouts))]
    newest = max(int(of.max(initial=0)) for of in own)
    weights = [(own[index] == newest) | (own[index] == GIVEN) for index in kept]
    return weighed(grpo(group, kept, stats_over=stats_over, eps=eps), weights)


class Uncertain:
    """A rule that reads the policy's entropy for each token of a group's kept rollouts; 0 for observations."""

    divides = True
    _bench: Bench

    def setup(self, runtime: Bench) -> None:
        self._bench = runtime

    def entropies(self, rollouts: Sequence[Rollout]) -> list[Float[np.ndarray, " L"]]:
        found = []
        for rollout, own in zip(rollouts, read(self._bench, rollouts, tokens=True).entropies, strict=True):
            found.append(np.zeros(len(rollout)))
            found[-1][versions(rollout) != ENVIRONMENT] = own
        return found


class MostUncertain(Uncertain):
    """`grpo` for the tokens that the policy was most uncertain of; of equal ones the first count."""

    def __init__(
        self,
        *,
        stats_over: StatsOver,
        eps: Epsilon,
        keep: Annotated[float, Field(gt=0, le=1)],
    ) -> None:
        self._stats_over, self._eps, self._keep = stats_over, eps, keep

    def __call__(self, group: ScoredGroup, kept: Sequence[int]) -> Float[Tensor, "K T"]:
        rollouts = [group.rollouts[index] for index in kept]
        flat = np.concatenate(self.entropies(rollouts))
        chosen = np.zeros(len(flat))
        chosen[np.argsort(-flat, kind="stable")[: math.ceil(self._keep * len(flat))]] = 1 / self._keep
        weights = np.split(chosen, np.cumsum([len(rollout) for rollout in rollouts])[:-1])
        return weighed(grpo(group, kept, stats_over=self._stats_over, eps=self._eps), weights)


class Doubted(Uncertain):
    """`grpo`, and more by how uncertain the policy was and by how unlikely the token is."""

    def __init__(
        self,
        *,
        stats_over: StatsOver,
        eps: Epsilon,
        amount: Annotated[float, Field(ge=0)],
        entropy: Annotated[float, Field(ge=0)],
        doubt: Annotated[float, Field(ge=0)],
        bound: Annotated[float, Field(gt=0)],
    ) -> None:
        self._stats_over, self._eps, self._amount = stats_over, eps, amount
        self._entropy, self._doubt, self._bound = entropy, doubt, bound

    def __call__(self, group: ScoredGroup, kept: Sequence[int]) -> Float[Tensor, "K T"]:
        rollouts = [group.rollouts[index] for index in kept]
        drawn = np.concatenate([~np.isnan(rollout.sampler_logprobs) for rollout in rollouts])
        doubts = 1 - np.exp(np.concatenate([rollout.sampler_logprobs for rollout in rollouts]))
        entropies = np.concatenate(self.entropies(rollouts))
        score = self._entropy * standard(entropies, drawn) + self._doubt * standard(doubts, drawn)
        weights = 1 + self._amount * score.clip(-self._bound, self._bound)
        split = np.split(weights, np.cumsum([len(rollout) for rollout in rollouts])[:-1])
        return weighed(grpo(group, kept, stats_over=self._stats_over, eps=self._eps), split)


def standard(values: Float[np.ndarray, " N"], drawn: Any) -> Float[np.ndarray, " N"]:
    """Return deviations from the mean of the sampled tokens; 0 for others, and where all are alike."""
    of = values[drawn]
    if not len(of) or (of == of[0]).all():
        return np.zeros(len(values))
    return np.where(drawn, (values - of.mean()) / of.std(), 0.0)
