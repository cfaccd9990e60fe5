"""Rollouts by how often problems were solved before: by the deviation, or learnt (GDRO, arXiv 2601.19280).

Both hand out as many as a plain step has, for its problems and no others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from grpo_cli.collect.counts import in_proportion
from grpo_cli.collect.mixed import check_decay
from grpo_cli.errors import UserError
from grpo_cli.history import of_kind
from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.types import GroupRequest, Round, ScoredGroup

UNSEEN = 0.5  # the share that a problem is taken to be solved with before its first visit
FEWEST = 2  # rollouts of a problem; one has nothing to be compared with
_TINY = 1e-300  # a chance that has a logarithm
_NO_MATTER = 1e-9  # in logarithms of probabilities; less than what any difference of scores comes to


def by_deviation(collection: Collection, *, floor: float, least: int, decay: float) -> Rounds:
    """In proportion to sqrt(p(1-p)), which the variance of a step's gradient is least with, at least `least` each.

    p is the decayed mean of the problem's earlier visits, 1/2 before the first; `floor` is the least deviation.
    """
    _check(floor, least, decay, collection.n)
    prompts = collection.pick(collection.prompts)
    rates = np.array([_rate(collection, prompt.id, decay) for prompt in prompts])
    shares = np.maximum(np.sqrt(rates * (1 - rates)), floor)
    counts = in_proportion(shares, collection.n * len(prompts), least, collection.rng)
    yield Round(tuple(GroupRequest(prompt, count) for prompt, count in zip(prompts, counts, strict=True)))
    return None


def _rate(collection: Collection, problem: str, decay: float) -> float:
    known = collection.history.rate(problem, decay)
    return UNSEEN if known is None else known


def _check(floor: float, least: int, decay: float, n: int) -> None:
    if not 0 < floor <= 0.5:
        raise UserError(f"collector.floor={floor} must be more than 0 and at most 0.5, the largest deviation there is")
    if least < FEWEST:
        raise UserError(f"collector.least={least} must be at least 2: one rollout has nothing to be compared with")
    if least > n:
        raise UserError(f"collector.least={least} is more than n={n}, the mean size of a group: lower it")
    check_decay(decay)


class Exp3:
    """Problems in bins by their solved share, and each bin's number of rollouts learnt from what it brought.

    The arms of a bin are the numbers 2..3n. An arm has probability (1 - gamma) * softmax(eta * scores) + gamma / arms,
    and a step takes the most probable arms that together use exactly the rollouts of a plain step; afterwards the
    score of each arm that was taken rises by the mean share of failures in its bin. Among equally probable ones chance
    decides. All bins with arm n are always such a set, so that the price that the paper puts on rollouts beyond the
    budget never moves from 0 and is left out.
    """

    def __init__(self, bins: int, eta: float, gamma: float, decay: float) -> None:
        if bins < 1:
            raise UserError(f"collector.bins={bins} must be at least 1")
        if not eta >= 0:
            raise UserError(f"collector.eta={eta} must be at least 0: it is how much scores count")
        if not 0 <= gamma <= 1:
            raise UserError(f"collector.gamma={gamma} must be from 0 to 1: it is the share of arms taken at random")
        check_decay(decay)
        self._edges = [place / bins for place in range(1, bins)]
        self._eta, self._gamma, self._decay = eta, gamma, decay
        self._scores: dict[tuple[int, int], float] = {}  # of the arms of bins that were ever taken
        self._taken: dict[str, tuple[int, int]] = {}  # the bin and arm of each problem of the step that is under way

    def __call__(self, collection: Collection) -> Rounds:
        prompts, arms = collection.pick(collection.prompts), range(FEWEST, 3 * collection.n + 1)
        bins = [bisect_right(self._edges, _rate(collection, prompt.id, self._decay)) for prompt in prompts]
        sizes = sorted(Counter(bins).items())
        chances = np.log([np.maximum(self.chances(place, arms), _TINY) for place, _ in sizes])
        chances += collection.rng.random(chances.shape) * _NO_MATTER
        taken = likeliest(chances, [count for _, count in sizes], arms, collection.n * len(prompts))
        arm_of = {place: arm for (place, _), arm in zip(sizes, taken, strict=True)}
        for place, arm in arm_of.items():
            collection.note(f"bin_{place}", float(arm))
        self._taken = {prompt.id: (place, arm_of[place]) for prompt, place in zip(prompts, bins, strict=True)}
        yield Round(tuple(GroupRequest(prompt, arm_of[place]) for prompt, place in zip(prompts, bins, strict=True)))
        return None

    def chances(self, place: int, arms: Sequence[int]) -> Float[np.ndarray, " A"]:
        """The probability of each arm of a bin."""
        scores = self._eta * np.array([self._scores.get((place, arm), 0.0) for arm in arms])
        weights = np.exp(scores - scores.max())
        return (1 - self._gamma) * weights / weights.sum() + self._gamma / len(arms)

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        failures: dict[tuple[int, int], list[float]] = {}
        for group in groups:
            if (taken := self._taken.get(group.prompt.id)) is not None:
                failures.setdefault(taken, []).append(1 - group.solved / len(group.rollouts))
        for taken, shares in failures.items():
            self._scores[taken] = self._scores.get(taken, 0.0) + sum(shares) / len(shares)
        self._taken = {}  # what was learnt once is not learnt again
        return {}

    def state_dict(self) -> dict[str, Any]:
        scores = [(place, arm, score) for (place, arm), score in self._scores.items()]
        return {"kind": "exp3", "bins": len(self._edges) + 1, "scores": scores}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        state, bins = of_kind(state, "collector", "exp3"), len(self._edges) + 1
        if state["bins"] != bins:
            raise UserError(
                f"the checkpoint holds what collector=exp3 has learnt of {state['bins']} bins, but this run has "
                f"collector.bins={bins}; resume with collector.bins={state['bins']}, or start a new run"
            )
        self._scores = {(place, arm): score for place, arm, score in state["scores"]}
        self._taken = {}


def likeliest(chances: Float[np.ndarray, "B A"], sizes: Sequence[int], arms: Sequence[int], total: int) -> list[int]:
    """An arm for each bin, so that sizes . arms = total and the sum of `chances` (logarithms) is as large as can be.

    `best[s]` is that largest sum for the bins so far when they use s rollouts. O(bins * arms * total). There has to be
    such a set.
    """
    best = np.full(total + 1, -np.inf)
    best[0] = 0.0
    steps: list[np.ndarray] = []
    for place, size in enumerate(sizes):
        longer, step = np.full(total + 1, -np.inf), np.zeros(total + 1, dtype=np.int64)
        for number, arm in enumerate(arms):
            used = size * arm
            if used > total:
                break
            candidate = best[: total + 1 - used] + chances[place, number]
            better = candidate > longer[used:]
            longer[used:][better] = candidate[better]
            step[used:][better] = arm
        best = longer
        steps.append(step)
    assert best[total] > -np.inf, "an exact set exists: n for all"
    taken: list[int] = []
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        taken.append(int(step[total]))
        total -= size * taken[-1]
    return taken[::-1]
