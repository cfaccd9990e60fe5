"""Problems that are solved about as often as is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from grpo_cli.collect.candidates import CandidateOrder, never_revisited, no_share, not_at_least, not_positive
from grpo_cli.collect.epochs import of_kind
from grpo_cli.collect.requests import seed_of
from grpo_cli.history import History
from grpo_cli.support.errors import refuse
from grpo_cli.types import Prompt, ScoredGroup

UNSEEN = 0.5  # the rate of a problem that was never visited


class TargetRate:
    """CandidateOrder drawn without replacement, each with a weight of exp(-|rate - target| / temperature) (DOTS, arXiv
    2506.05316). A problem's rate is the decayed mean of its own visits: a model that predicts it is left out."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        per_step: int,
        steps: int,
        seed: int,
        history: History,
        *,
        target: float,
        temperature: float,
        pool: int,
        decay: float,
    ) -> None:
        never = never_revisited("target", len(prompts), per_step, steps, history)
        refuse([*self.refuses(target=target, temperature=temperature, pool=pool, decay=decay), *never])
        self._prompts, self._seed, self._history = prompts, seed, history
        self._target, self._temperature, self._decay = target, temperature, decay
        self._candidates = CandidateOrder(prompts, per_step, seed, pool)
        self._step = -1  # that is being made
        self._predicted = dict[str, float]()  # of what was picked and is not seen yet

    @staticmethod
    def refuses(*, target: float, temperature: float, pool: int, decay: float) -> Iterator[str]:
        """What is wrong with its settings."""
        yield from no_share("target", target)
        yield from not_positive("temperature", temperature)
        yield from not_at_least("pool", pool, 1)
        yield from no_share("decay", decay)

    def pick(self, step: int, count: int, without: Set[str]) -> list[Prompt]:
        if step != self._step:
            self._step = step
            self._predicted = {name: rate for name, rate in self._predicted.items() if name in without}
        prompts = [self._prompts[place] for place in self._candidates.places(step, count, without)]
        rates = np.array([self._rate(prompt) for prompt in prompts])
        rng = np.random.default_rng(seed_of(self._seed, step, "target", len(without)))
        # The largest of log-weights with Gumbel noise are a draw without replacement.
        keys = -np.abs(rates - self._target) / self._temperature + rng.gumbel(size=len(prompts))
        chosen = np.argsort(-keys, kind="stable")[:count]
        self._predicted |= {prompts[place].id: float(rates[place]) for place in chosen}
        return [prompts[place] for place in chosen]

    def _rate(self, prompt: Prompt) -> float:
        rate = self._history.rate(prompt.id, self._decay)
        return UNSEEN if rate is None else rate

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        predicted = [self._predicted.pop(group.prompt.id) for group in groups if group.prompt.id in self._predicted]
        self._step = -1  # a step that is made again begins anew
        return {"curriculum/predicted_rate": float(np.mean(predicted))} if predicted else {}

    def state_dict(self) -> dict[str, Any]:
        """Where it is in the order of candidates, and what it predicted of groups that are under way; what was seen of
        problems is the history's to keep."""
        return {"kind": "target", "order": self._candidates.state_dict(), "predicted": dict(self._predicted)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        state = of_kind(state, "curriculum", "target")
        self._candidates.load_state_dict(state["order"])
        self._predicted = dict(state.get("predicted", {}))
