"""DOTS (arXiv 2506.05316): problems whose share of right rollouts is near a target (`curriculum=target`).

    P(problem) ~ exp(-|rate - target| / temperature), without replacement

Measured: docs/studies.md (no difference at the end, earlier in every seed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from grpo_cli.collect.epochs import CandidateOrder, require_revisits
from grpo_cli.collect.requests import seed_of
from grpo_cli.history import History, of_kind
from grpo_cli.support.ranges import Count, Share
from grpo_cli.types import Prompt, ScoredGroup


class TargetRate:
    """Candidates drawn without replacement, each with a weight of exp(-|rate - target| / temperature) (DOTS, arXiv
    2506.05316). A problem's rate is the decayed mean of its own visits: a model that predicts it is left out."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        per_step: int,
        steps: int,
        seed: int,
        history: History,
        *,
        target: Share,
        temperature: Annotated[float, Field(gt=0)],
        pool: Count,
        decay: Share,
    ) -> None:
        require_revisits("target", len(prompts), per_step, steps)
        self._prompts, self._seed, self._history = prompts, seed, history
        self._target, self._temperature, self._decay = target, temperature, decay
        self._candidates = CandidateOrder(prompts, per_step, seed, pool)
        self._step = -1  # that is being made
        self._predicted = dict[str, float]()  # of what was picked and is not seen yet

    def pick(self, step: int, count: int, without: Set[str]) -> list[Prompt]:
        if step != self._step:
            self._step = step
            self._predicted = {name: rate for name, rate in self._predicted.items() if name in without}
        prompts = [self._prompts[place] for place in self._candidates.places(step, count, without)]
        rates = np.array([self._history.rate(prompt.id, self._decay) for prompt in prompts])
        rng = np.random.default_rng(seed_of(self._seed, step, "target", len(without)))
        # The largest of log-weights with Gumbel noise are a draw without replacement.
        keys = -np.abs(rates - self._target) / self._temperature + rng.gumbel(size=len(prompts))
        chosen = np.argsort(-keys, kind="stable")[:count]
        self._predicted |= {prompts[place].id: float(rates[place]) for place in chosen}
        return [prompts[place] for place in chosen]

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        predicted = [self._predicted.pop(group.prompt.id) for group in groups if group.prompt.id in self._predicted]
        self._step = -1  # a repeated step starts over
        return {"curriculum/predicted_rate": float(np.mean(predicted))} if predicted else {}

    def state_dict(self) -> dict[str, Any]:
        """Return its place in the order of candidates, and what it predicted of groups that are under way; what was
        seen of problems is the history's to keep."""
        return {"kind": "target", "order": self._candidates.state_dict(), "predicted": dict(self._predicted)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        state = of_kind(state, "curriculum", "target")
        self._candidates.load_state_dict(state["order"])
        self._predicted = dict(state["predicted"])
