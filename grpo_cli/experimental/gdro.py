"""GDRO (arXiv 2601.19280): prompts weigh by how often those of their difficulty fail (Prompt-GDRO, `advantage=gdro`),
and get rollouts by the deviation of their outcomes (Rollout-GDRO, `collector=sqrt`).

    gdro    score_b <- (1 - beta) score_b + beta (mean failure share in b) / (share of the step's prompts in b)
            w = (1 - gamma) softmax(eta score)_b + gamma / bins;  A = w / (mean w of the step before) A_grpo, the
            factor at most `cap`
    sqrt    rollouts ~ max(sqrt(p (1 - p)), floor), at least `least`, n per prompt on average

The square root is what the theory of Rollout-GDRO comes to: with a fixed number of rollouts, the variance of a step's
gradient is least in this proportion. The paper itself learns its allocation with a bandit whose fixed point this is.
Ours: w is divided by the mean of the step before, since a group's advantage knows no other group of its step.

Not measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_cli.experimental.apportion import in_proportion
from grpo_cli.history import KEPT, UNSEEN, of_kind
from grpo_cli.interfaces import Bench, StepRollouts
from grpo_cli.rules.advantage import Epsilon, StatsOver, grpo
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import facts
from grpo_cli.support.ranges import Count, Share
from grpo_cli.types import ScoredGroup


class PromptGdro:
    """`grpo` times a weight of the prompt's bin by solved share, the larger the more often the bin fails.

    A prompt's rate is the mean share of rollouts that solved it in its last `window` visits. It leaves its bin only if
    the rate is beyond an edge by `hysteresis`. A bin without prompts in a step has a failure term of 0.
    """

    divides = True

    def __init__(
        self,
        *,
        stats_over: StatsOver,
        eps: Epsilon,
        bins: Count,
        eta: Annotated[float, Field(ge=0)],
        gamma: Share,
        beta: Share,
        cap: Annotated[float, Field(ge=1)],
        hysteresis: Annotated[float, Field(ge=0)],
        window: Annotated[int, Field(ge=1, le=KEPT)],
    ) -> None:
        self._stats_over, self._eps = stats_over, eps
        self._eta, self._gamma, self._beta, self._cap = eta, gamma, beta, cap
        self._hysteresis, self._window = hysteresis, window
        self._edges = [place / bins for place in range(1, bins)]
        self._scores, self._mean = np.zeros(bins), 1 / bins
        self._bin_of: dict[str, int] = {}  # of every prompt that was seen, for the hysteresis
        self._now: dict[str, int] = {}  # of the prompts of the step that is under way

    def setup(self, runtime: Bench) -> None:
        self._history = runtime.history

    def __call__(self, group: ScoredGroup, kept: Sequence[int]) -> Float[Tensor, " K"]:
        place = self._now[group.prompt.id] = self._bin(group.prompt.id)
        factor = min(self.bin_weights()[place] / self._mean, self._cap)
        return factor * grpo(group, kept, stats_over=self._stats_over, eps=self._eps)

    def bin_weights(self) -> Float[np.ndarray, " bins"]:
        """Return each bin's weight by the scores; they sum to 1."""
        weights = np.exp(self._eta * (self._scores - self._scores.max()))
        return (1 - self._gamma) * weights / weights.sum() + self._gamma / len(weights)

    def _bin(self, problem: str) -> int:
        visits = self._history.visits(problem)[-self._window :]
        rate = sum(visit.solved / visit.tried for visit in visits) / len(visits) if visits else UNSEEN
        found, before = bisect_right(self._edges, rate), self._bin_of.get(problem)
        if before is not None:
            low, high = [-np.inf, *self._edges, np.inf][before : before + 2]
            found = before if low - self._hysteresis <= rate < high + self._hysteresis else found
        self._bin_of[problem] = found
        return found

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        now, self._now = self._now, {}
        seen = [(now[g.prompt.id], 1 - g.solved / len(g.rollouts)) for g in groups if g.prompt.id in now]
        if not seen:  # nothing was trained on
            return {}
        bins, failures = (np.array(values) for values in zip(*seen, strict=True))
        weights = self.bin_weights()[bins]
        found = np.zeros(len(self._scores))
        for place in set(bins.tolist()):
            own = failures[bins == place]
            found[place] = own.mean() * len(bins) / len(own)
        self._scores, self._mean = (1 - self._beta) * self._scores + self._beta * found, float(weights.mean())
        return {"gdro/weight_max": float(weights.max() / self._mean)}

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "gdro", "scores": self._scores.tolist(), "mean": self._mean, "bin_of": dict(self._bin_of)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        state = of_kind(state, "advantage", "gdro")
        if len(state["scores"]) != len(self._scores):
            raise UserError(f"the checkpoint has {len(state['scores'])} bins: resume with the same advantage.bins")
        self._scores, self._mean = np.array(state["scores"]), state["mean"]
        self._bin_of = dict(state["bin_of"])


FEWEST = 2  # rollouts of a prompt; one has nothing to be compared with


@facts(unequal=True)
def by_deviation(
    step: StepRollouts,
    *,
    floor: Annotated[float, Field(gt=0, le=0.5)],
    least: Annotated[int, Field(ge=FEWEST)],
    decay: Annotated[float, Field(ge=0, le=1)],
) -> list[ScoredGroup]:
    """p is the decayed mean of the prompt's earlier visits, 1/2 before the first; `floor` is the least deviation."""
    if least > step.n:
        raise UserError(f"collector.least={least} is more than n={step.n}, the mean size of a group: lower it")
    prompts = step.pick(step.prompts)
    rates = np.array([step.history.rate(prompt.id, decay) for prompt in prompts])
    shares = np.maximum(np.sqrt(rates * (1 - rates)), floor)
    counts = in_proportion(shares, step.n * len(prompts), least, step.rng)
    return step.score(step.generate(zip(prompts, counts, strict=True)))
