"""DOTS (arXiv 2506.05316): problems that are solved about as often as is wanted (`curriculum=target`), and groups of
earlier steps that are trained on again (`replay=fifo`), which loses accuracy here.

    target    P(problem) ~ exp(-|rate - target| / temperature), without replacement
    fifo      max(ceil(fresh * prompts), prompts - stored) new problems; the others are stored groups, drawn uniformly

Measured: scripts/reproduce/frontier_a.md (`target`: no difference at the end, earlier in every seed) and
scripts/reproduce/frontier_b.md (`fifo`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, Any

import numpy as np

from grpo_cli.collect.candidates import CandidateOrder, require_revisits
from grpo_cli.collect.requests import seed_of
from grpo_cli.collect.stored import drawn, from_plain, prompt_of, to_plain, version_of
from grpo_cli.history import History, digest_of, of_kind
from grpo_cli.support.facts import facts
from grpo_cli.support.ranges import Count, Range, Share
from grpo_cli.types import Prompt, ScoredGroup


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
        target: Share,
        temperature: Annotated[float, Range(0, above=True)],
        pool: Count,
        decay: Share,
    ) -> None:
        require_revisits("target", len(prompts), per_step, steps, history)
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
        """Where it is in the order of candidates, and what it predicted of groups that are under way; what was seen of
        problems is the history's to keep."""
        return {"kind": "target", "order": self._candidates.state_dict(), "predicted": dict(self._predicted)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        state = of_kind(state, "curriculum", "target")
        self._candidates.load_state_dict(state["order"])
        self._predicted = dict(state.get("predicted", {}))


@facts(replays=True)
class GroupStore:
    """A share of the step's problems is asked of the model, and groups of earlier steps take the place of the others.
    Too few of them are filled up with new ones.

    A group is stored once its step is over, unless all its rewards are equal: one of each problem, of which the newest
    stays, and the oldest go beyond `capacity`. It keeps the log-probabilities that its tokens were drawn with, and the
    rewards that they earned. One whose oldest token is of weights more than `max_lag` updates ago is dropped. Stored
    groups are drawn without replacement and each alike, those of problems that the step asks anew after all others.

    `rescue`: a new group without a success gets a stored one of the same problem in place of one of its failures
    (DART-GUI); then a group without a success does not take the place of a stored one that has some.
    """

    def __init__(
        self,
        *,
        fresh: Annotated[float, Range(0, 1, "the share of new problems in a step; 1 is replay=none", above=True)],
        capacity: Annotated[int, Range(1, because="to store no group there is replay=none")],
        max_lag: Annotated[int | None, Range(1, because="a group is a step's updates old; null is no bound")],
        rescue: bool,
    ) -> None:
        self._share = Fraction(str(fresh))  # in floating point 0.1 * 30 is more than 3
        self._capacity, self._max_lag, self._rescue = capacity, max_lag, rescue
        # Of each problem, the oldest first, as a checkpoint keeps it: a tenth of what the values themselves take.
        self._stored: dict[str, Mapping[str, Any]] = {}
        self._rescued = 0  # in the step that is under way

    def fresh(self, prompts: int, version: int) -> int:
        if (most := self._max_lag) is not None:
            self._stored = {name: kept for name, kept in self._stored.items() if version - version_of(kept) <= most}
        return max(math.ceil(self._share * prompts), prompts - len(self._stored))

    def draw(
        self, count: int, fresh: Sequence[ScoredGroup], version: int, rng: np.random.Generator
    ) -> Sequence[ScoredGroup]:
        rescued = [self._with_success(group, rng) for group in fresh] if self._rescue else [*fresh]
        self._rescued = sum(new is not old for new, old in zip(rescued, fresh, strict=True))
        return [*rescued, *drawn([*self._stored.values()], count, fresh, rng)]

    def _with_success(self, group: ScoredGroup, rng: np.random.Generator) -> ScoredGroup:
        """The group, with a stored success of its problem added if it has none of its own."""
        kept = self._stored.get(group.prompt.id)
        stored = None if group.solved or kept is None else from_plain(kept)
        if stored is None or not stored.solved:
            return group
        right = [place for place, reward in enumerate(stored.rewards) if reward.solved]
        taken, left = int(rng.choice(right)), int(rng.integers(len(group.rollouts)))
        rollouts, rewards = list(group.rollouts), list(group.rewards)
        rollouts[left], rewards[left] = stored.rollouts[taken], stored.rewards[taken]
        return replace(group, rollouts=tuple(rollouts), rewards=tuple(rewards))

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        if self._share < 1 or self._rescue:
            for group in groups:
                self._store(group)
        return {"replay/rescued": float(self._rescued)} if self._rescue else {}

    def _store(self, group: ScoredGroup) -> None:
        before = self._stored.get(group.prompt.id)
        if (group.totals == group.totals[0]).all():
            return
        if self._rescue and not group.solved and before is not None and from_plain(before).solved:
            return
        self._stored.pop(group.prompt.id, None)
        self._stored[group.prompt.id] = to_plain(group)
        if len(self._stored) > self._capacity:
            del self._stored[next(iter(self._stored))]

    def forget(self, is_other: Callable[[str, int], bool]) -> None:
        """As `interfaces.Forgets` has it."""
        stored = self._stored.items()
        self._stored = {name: kept for name, kept in stored if not is_other(name, digest_of(prompt_of(kept)))}

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "fifo", "stored": list(self._stored.values())}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        stored = of_kind(state, "replay", "fifo")["stored"][-self._capacity :]
        self._stored = {kept["prompt"][0]: kept for kept in stored}
