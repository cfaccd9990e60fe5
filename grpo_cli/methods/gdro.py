"""GDRO (arXiv 2601.19280): problems weigh by how often those of their difficulty fail (Prompt-GDRO, `credit=gdro`), and
get rollouts by the deviation of their outcomes (Rollout-GDRO, `collector=sqrt`).

    gdro    score_b <- (1 - beta) score_b + beta (mean failure share in b) / (share of the step's problems in b)
            w = (1 - gamma) softmax(eta score)_b + gamma / bins, over its mean over the batch, at most `cap`
    sqrt    rollouts ~ max(sqrt(p (1 - p)), floor), at least `least`, n per problem on average

The square root is what the theory of Rollout-GDRO comes to: with a fixed number of rollouts, the variance of a step's
gradient is least in this proportion. The paper itself learns its allocation with a bandit whose fixed point this is.

Not measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.collect.apportion import in_proportion
from grpo_cli.history import KEPT, UNSEEN, History, Marked, Solved, of_kind
from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import OneOf, Range, Share
from grpo_cli.types import Batch, GroupRequest, Round, ScoredGroup


class PromptGdro:
    """Problems weigh by the bin of their solved share, bins by how often they failed (Prompt-GDRO, arXiv 2601.19280).

    A problem's rate is taken over its last `window` visits: `mean`, the mean share of rollouts that solved it, or
    `any`, the share of visits in which any did. It leaves its bin only if the rate is beyond an edge by `hysteresis`. A
    bin without problems in a step has a failure term of 0.
    """

    def __init__(
        self,
        bins: Any,
        eta: Annotated[float, Range(0)],
        gamma: Share,
        beta: Share,
        cap: Annotated[float, Range(1, because="the mean weight is 1")],
        hysteresis: Annotated[float, Range(0)],
        window: Annotated[int, Range(1, KEPT, "more visits of a problem are not kept")],
        rate: Annotated[str, OneOf(("any", "mean"))],
    ) -> None:
        self._edges = _edges(bins)
        self._eta, self._gamma, self._beta, self._cap = eta, gamma, beta, cap
        self._hysteresis, self._window, self._rate = hysteresis, window, rate
        self._scores = [0.0] * (len(self._edges) + 1)
        self._bin_of = Marked[str, int]()  # of every problem that was seen, for the hysteresis
        self._now: dict[str, int] = {}  # of the problems of the step that is under way
        self._weight_max = 1.0

    def __call__(self, batch: Batch, problems: Sequence[str], history: History) -> Float[Tensor, "B T"]:
        self._now = {problem: self._bin(problem, history) for problem in dict.fromkeys(problems)}
        bins = self.bin_weights()
        rows = np.array([bins[self._now[problem]] for problem in problems])
        rows = np.minimum(rows / rows.mean(), self._cap)
        self._weight_max = float(rows.max())
        return torch.ones_like(batch.weights) * torch.tensor(rows, dtype=batch.weights.dtype)[:, None]

    def bin_weights(self) -> Float[np.ndarray, " bins"]:
        """Each bin's weight by the scores, before the mean and the cap. The weights sum to 1."""
        scores = self._eta * np.array(self._scores)
        weights = np.exp(scores - scores.max())
        return (1 - self._gamma) * weights / weights.sum() + self._gamma / len(weights)

    def _bin(self, problem: str, history: History) -> int:
        visits = history.visits(problem)[-self._window :]
        if not visits:
            return bisect_right(self._edges, UNSEEN)
        shares = [visit.solved / visit.tried for visit in visits]
        if self._rate == "any":
            shares = [float(visit.outcome is not Solved.NONE) for visit in visits]
        rate = sum(shares) / len(shares)
        found, before = bisect_right(self._edges, rate), self._bin_of.get(problem)
        if before is not None:
            low, high = [-np.inf, *self._edges, np.inf][before : before + 2]
            found = before if low - self._hysteresis <= rate < high + self._hysteresis else found
        self._bin_of[problem] = found
        return found

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        failures: dict[int, list[float]] = {}
        for group in groups:  # by the bins that they had before: the history has this step already
            if group.prompt.id in self._now:
                share = 1 - group.solved / len(group.rollouts)
                failures.setdefault(self._now[group.prompt.id], []).append(share)
        if not failures:  # nothing was trained on
            return {}
        total = sum(map(len, failures.values()))
        # the mean of a bin's shares, divided by the part of the problems that it has
        found = {place: sum(shares) / len(shares) * total / len(shares) for place, shares in failures.items()}
        self._scores = [
            (1 - self._beta) * score + self._beta * found.get(place, 0.0) for place, score in enumerate(self._scores)
        ]
        self._now = {}  # what was learnt once is not learnt again
        return {"credit/weight_max": self._weight_max}

    def state_dict(self) -> dict[str, Any]:
        return self._plain(self._scores, self._bin_of)

    def mark(self) -> Callable[[], Mapping[str, Any]]:
        """As `interfaces.Marks` has it."""
        scores, bin_of = self._scores, self._bin_of.mark()
        return lambda: self._plain(scores, bin_of())

    def _plain(self, scores: Sequence[float], bin_of: Mapping[str, int]) -> dict[str, Any]:
        return {"kind": "gdro", "edges": list(self._edges), "scores": list(scores), "bin_of": dict(bin_of)}

    def forget(self, is_other: Callable[[str], bool]) -> None:
        """As `interfaces.Forgets` has it. What was learnt about bins goes with the last of their problems."""
        known = len(self._bin_of)
        self._bin_of = Marked({problem: place for problem, place in self._bin_of.items() if not is_other(problem)})
        if known and not self._bin_of:
            self._scores = [0.0] * len(self._scores)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        state = of_kind(state, "credit", "gdro")
        if list(state["edges"]) != list(self._edges):
            raise UserError(
                f"the checkpoint holds what credit=gdro has learnt of bins with the edges {list(state['edges'])}, but "
                f"this run's are {list(self._edges)}; resume with the same credit.bins, or start a new run"
            )
        self._scores, self._bin_of, self._now = list(state["scores"]), Marked(state["bin_of"]), {}


def _edges(bins: Any) -> list[float]:
    """The edges between bins, from a number of bins or from the edges themselves."""
    if isinstance(bins, int):
        if bins < 1:
            raise UserError(f"credit.bins={bins} must be at least 1")
        return [place / bins for place in range(1, bins)]
    numbers = isinstance(bins, Sequence) and all(isinstance(edge, (int, float)) for edge in bins)
    if not numbers or not all(low < high for low, high in pairwise([0.0, *bins, 1.0])):
        raise UserError(f"credit.bins={bins} must be a number of bins, or edges that rise between 0 and 1")
    return [float(edge) for edge in bins]


FEWEST = 2  # rollouts of a problem; one has nothing to be compared with


def by_deviation(
    collection: Collection,
    *,
    floor: Annotated[float, Range(0, 0.5, "0.5 is the largest deviation there is", above=True)],
    least: Annotated[int, Range(FEWEST, because="one rollout has nothing to be compared with")],
    decay: Annotated[float, Range(0, 1, "with 0 the last visit alone counts, with 1 all count alike")],
) -> Rounds:
    """p is the decayed mean of the problem's earlier visits, 1/2 before the first; `floor` is the least deviation."""
    if least > collection.n:
        raise UserError(f"collector.least={least} is more than n={collection.n}, the mean size of a group: lower it")
    prompts = collection.pick(collection.prompts)
    rates = np.array([collection.history.rate(prompt.id, decay) for prompt in prompts])
    shares = np.maximum(np.sqrt(rates * (1 - rates)), floor)
    counts = in_proportion(shares, collection.n * len(prompts), least, collection.rng)
    yield Round(tuple(GroupRequest(prompt, count) for prompt, count in zip(prompts, counts, strict=True)))
    return None
