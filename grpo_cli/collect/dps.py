"""Problems that are predicted to be solved by some of their rollouts and not by others, which alone teach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from grpo_cli.collect.candidates import CandidateOrder, never_revisited, no_share, not_at_least, not_positive
from grpo_cli.collect.epochs import of_kind
from grpo_cli.collect.requests import seed_of
from grpo_cli.errors import UserError, refuse
from grpo_cli.history import History, Solved, Visit
from grpo_cli.types import Prompt, ScoredGroup

STATES = (Solved.NONE, Solved.MIXED, Solved.ALL)
MIXED = STATES.index(Solved.MIXED)
DIGITS = 9  # chances that agree to so many are a tie: what they differ by is rounding


class DynamicsPredictive:
    """The candidates that are likeliest to be mixed (dynamics-predictive sampling, arXiv 2603.10887).

    Each problem is a chain of three states: at a visit none of its rollouts solves it, some do, or all. Of every
    problem it keeps how often each state came after each (`counts`, a chain's prior included and older ones decayed),
    the chances of the states at the last visit or look (`before`), and those at the next one (`chances`); all float64.
    A candidate that no rollout was made of moves on by its own prediction.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        per_step: int,
        steps: int,
        seed: int,
        history: History,
        *,
        pool: int,
        decay: float,
        prior: float,
    ) -> None:
        never = never_revisited("dps", len(prompts), per_step, steps, history)
        refuse([*self.refuses(pool=pool, decay=decay, prior=prior), *never])
        self._prompts, self._seed, self._decay, self._prior = prompts, seed, decay, prior
        self._candidates = CandidateOrder(prompts, per_step, seed, pool)
        self._counts = np.full((len(prompts), 3, 3), prior)
        self._before = np.full((len(prompts), 3), 1 / 3)
        self._chances = self._before.copy()
        self._step, self._looked_at = -1, dict[int, None]()  # of the step that is being made
        self._picked = dict[str, int]()
        if history.profile:
            self._begin_with(history.profile)

    @staticmethod
    def refuses(*, pool: int, decay: float, prior: float) -> Iterator[str]:
        """What is wrong with its settings."""
        yield from not_at_least("pool", pool, 1)
        yield from no_share("decay", decay)
        yield from not_positive("prior", prior)

    def _begin_with(self, profile: Mapping[str, Visit]) -> None:
        """A profile counts as a first visit of each problem in it."""
        seen = {place: profile[p.id] for place, p in enumerate(self._prompts) if p.id in profile}
        self._move_on(np.array([*seen], dtype=np.int64), _certain([*seen.values()]))

    def pick(self, step: int, count: int, without: Set[str]) -> list[Prompt]:
        if step != self._step:
            self._step, self._looked_at, self._picked = step, {}, {}
        places = self._candidates.places(step, count, without)
        self._looked_at |= dict.fromkeys(places)
        rng = np.random.default_rng(seed_of(self._seed, step, "dps", len(without)))
        order = np.lexsort((rng.random(len(places)), -self._chances[places, MIXED].round(DIGITS)))
        chosen = [places[place] for place in order[:count]]
        self._picked |= {self._prompts[place].id: place for place in chosen}
        return [self._prompts[place] for place in chosen]

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        asked = {self._picked[group.prompt.id]: group for group in groups if group.prompt.id in self._picked}
        places, others = [*asked], [place for place in self._looked_at if place not in asked]
        visits = [Visit(step, group.solved, len(group.rollouts)) for group in asked.values()]
        predicted = self._chances[places, MIXED]
        self._move_on(np.array(places, dtype=np.int64), _certain(visits))
        self._look_again(np.array(others, dtype=np.int64))
        self._step = -1  # a step that is made again begins anew
        if not asked:
            return {}
        hits = [visit.outcome is Solved.MIXED for visit in visits]
        return {"curriculum/predicted_mixed": float(predicted.mean()), "curriculum/hit": sum(hits) / len(hits)}

    def _move_on(self, places: Int[np.ndarray, "Q"], found: Float[np.ndarray, "Q 3"]) -> None:
        """Learn that these problems are in the states `found`, and how they may have come there."""
        ways = found[:, :, None] * self._before[places][:, None, :] * _chain(self._counts[places])
        self._forget(places)
        self._counts[places] += ways / ways.sum((1, 2), keepdims=True)
        self._predict(places, found)

    def _look_again(self, places: Int[np.ndarray, "Q"]) -> None:
        """Of these nothing was seen: what was predicted is what is believed."""
        self._forget(places)
        self._predict(places, self._chances[places])

    def _forget(self, places: Int[np.ndarray, "Q"]) -> None:
        self._counts[places] = self._decay * self._counts[places] + (1 - self._decay) * self._prior

    def _predict(self, places: Int[np.ndarray, "Q"], now: Float[np.ndarray, "Q 3"]) -> None:
        self._before[places] = now
        self._chances[places] = (_chain(self._counts[places]) * now[:, None, :]).sum(2)

    def state_dict(self) -> dict[str, Any]:
        arrays = {"counts": self._counts, "before": self._before, "chances": self._chances}
        kept = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        return {"kind": "dps", "order": self._candidates.state_dict(), **kept}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        state = of_kind(state, "curriculum", "dps")
        known = len(state["counts"])
        if known != len(self._prompts):
            raise UserError(
                f"the checkpoint holds what curriculum=dps has learnt of {known} problems, but the task has "
                f"{len(self._prompts)}; resume with the task as it was, or start a new run"
            )
        self._candidates.load_state_dict(state["order"])
        self._counts, self._before, self._chances = (
            state[name].numpy().copy() for name in ("counts", "before", "chances")
        )


def _chain(counts: Float[np.ndarray, "Q 3 3"]) -> Float[np.ndarray, "Q 3 3"]:
    """Chance of each state (rows) after each (columns)."""
    return counts / counts.sum(1, keepdims=True)


def _certain(visits: Sequence[Visit]) -> Float[np.ndarray, "Q 3"]:
    """All chance to the state that each visit was in."""
    return np.eye(3)[[STATES.index(visit.outcome) for visit in visits]].reshape(-1, 3)
