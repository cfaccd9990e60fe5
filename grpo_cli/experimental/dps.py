"""DPS, no difference from plain epochs seen here: prompts that are predicted to be solved by some of their rollouts
and not by others, which alone teach (arXiv 2603.10887).

    T[s', s] = C[s', s] / sum_s' C[s', s];  P(next) = T P(now);  the highest P(next = mixed) are chosen
    after a visit  C <- decay C + (1 - decay) prior + xi,  xi[s', s] ~ [outcome = s'] T[s', s] P(before = s), of sum 1

Measured: docs/studies.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field

from grpo_cli.collect.epochs import CandidateOrder, require_revisits
from grpo_cli.collect.requests import seed_of
from grpo_cli.history import of_kind
from grpo_cli.support.ranges import Count, Share
from grpo_cli.types import Prompt, ScoredGroup

NONE, MIXED, ALL = range(3)  # states
BEFORE, CHANCES = 3, 4  # the rows of a belief after its counts
DIGITS = 9  # chances equal to 9 decimal places are a tie: the rest is rounding


class DynamicsPredictive:
    """The candidates most likely to be mixed (dynamics-predictive sampling, arXiv 2603.10887).

    Each prompt is a chain of three states: at a visit none of its rollouts solves it, some do, or all. The belief about
    a prompt that was visited has five rows: how often each state came after each (the prior included, older ones
    decayed), the chances of the states at the last visit or look, and those at the next one. A candidate that no
    rollout was made of moves on by its own prediction. One whose rollouts end in a later step is learnt from then;
    until then its id is in `without`.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        per_step: int,
        steps: int,
        seed: int,
        *,
        pool: Count,
        decay: Share,
        prior: Annotated[float, Field(gt=0)],
    ) -> None:
        require_revisits("dps", len(prompts), per_step, steps)
        self._prompts, self._seed, self._decay, self._prior = prompts, seed, decay, prior
        self._candidates = CandidateOrder(prompts, per_step, seed, pool)
        self._unseen = np.concatenate([np.full((3, 3), prior), np.full((2, 3), 1 / 3)])
        self._beliefs = dict[int, np.ndarray]()  # by place in the task; replaced, and never changed
        self._step, self._looked_at = -1, dict[int, None]()  # of the step that is being made
        self._picked = dict[str, int]()  # and not learnt from yet

    def pick(self, step: int, count: int, without: Set[str]) -> list[Prompt]:
        if step != self._step:
            self._step, self._looked_at = step, {}
            left_out = [name for name in self._picked if name not in without]  # no rollout of these was made
            self._look_again([self._picked.pop(name) for name in left_out])
        places = self._candidates.places(step, count, without)
        self._looked_at |= dict.fromkeys(places)
        rng = np.random.default_rng(seed_of(self._seed, step, "dps", len(without)))
        order = np.lexsort((rng.random(len(places)), -self._mixed(places).round(DIGITS)))
        chosen = {self._prompts[places[place]]: places[place] for place in order[:count]}
        self._picked |= {prompt.id: place for prompt, place in chosen.items()}
        return [*chosen]

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        asked = {self._picked.pop(g.prompt.id): g for g in groups if g.prompt.id in self._picked}
        waiting = {*asked, *self._picked.values()}
        shares = [group.solved / len(group.rollouts) for group in asked.values()]
        states = [NONE if share == 0 else ALL if share == 1 else MIXED for share in shares]
        predicted = self._mixed([*asked])
        self._move_on([*asked], np.eye(3)[np.array(states, dtype=int)])  # probability 1 for the state of each visit
        self._look_again([place for place in self._looked_at if place not in waiting])
        self._step, self._looked_at = -1, {}  # a repeated step starts over
        if not asked:
            return {}
        hit = states.count(MIXED) / len(states)
        return {"curriculum/predicted_mixed": float(predicted.mean()), "curriculum/hit": hit}

    def _move_on(self, places: Sequence[int], found: Float[np.ndarray, "Q 3"]) -> None:
        """Learn that the prompts at these places are in the states `found`, and how they may have come there."""
        beliefs = self._of(places)
        ways = found[:, :, None] * beliefs[:, BEFORE][:, None, :] * _chain(beliefs[:, :3])
        self._keep(places, self._decayed(beliefs) + ways / ways.sum((1, 2), keepdims=True), found)

    def _look_again(self, places: Sequence[int]) -> None:
        """Make the prediction the belief: nothing was observed of these."""
        seen = [place for place in places if place in self._beliefs]
        beliefs = self._of(seen)
        self._keep(seen, self._decayed(beliefs), beliefs[:, CHANCES])

    def _of(self, places: Sequence[int]) -> Float[np.ndarray, "Q 5 3"]:
        return np.array([self._beliefs.get(place, self._unseen) for place in places]).reshape(-1, 5, 3)

    def _mixed(self, places: Sequence[int]) -> Float[np.ndarray, "Q"]:
        return self._of(places)[:, CHANCES, MIXED]

    def _decayed(self, beliefs: Float[np.ndarray, "Q 5 3"]) -> Float[np.ndarray, "Q 3 3"]:
        return self._decay * beliefs[:, :3] + (1 - self._decay) * self._prior

    def _keep(self, places: Sequence[int], counts: Float[np.ndarray, "Q 3 3"], now: Float[np.ndarray, "Q 3"]) -> None:
        chances = (_chain(counts) * now[:, None, :]).sum(2)
        beliefs = np.concatenate([counts, now[:, None], chances[:, None]], axis=1)
        self._beliefs |= zip(places, beliefs, strict=True)

    def state_dict(self) -> dict[str, Any]:
        places = [*self._beliefs]
        kept = {"places": places, "beliefs": torch.from_numpy(self._of(places))}
        return {"kind": "dps", "order": self._candidates.state_dict(), "picked": dict(self._picked), **kept}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        state = of_kind(state, "curriculum", "dps")
        self._candidates.load_state_dict(state["order"])
        self._picked = dict(state["picked"])
        self._beliefs = dict(zip(state["places"], state["beliefs"].numpy().copy(), strict=True))


def _chain(counts: Float[np.ndarray, "Q 3 3"]) -> Float[np.ndarray, "Q 3 3"]:
    """Return P(row's state | column's state)."""
    return counts / counts.sum(1, keepdims=True)
