"""APRIL: a step ends before its longest rollouts do, which continue in the next (arXiv 2509.18521).

    in flight = ceil((1 + surplus) * prompts);  a step ends when `prompts` groups are whole
    a held group whose oldest token has lag >= max_lag updates is finished first

Measured: scripts/reproduce/frontier_b.md (no difference in accuracy seen, fewer decode steps).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated

from grpo_cli.collect.stored import HoldsGroups
from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.support.ranges import Range
from grpo_cli.types import GIVEN, Group, GroupRequest, Round


class Partial(HoldsGroups):
    """`1 + surplus` times a plain step's problems are under way, and a step ends when a plain step's number of groups
    is whole (APRIL, arXiv 2509.18521). The others are held, with the rollouts that have ended and those that have not,
    and go on first in the next step.

    Groups that are whole at the same moment are all trained on: nothing is lost, and nothing comes twice. One whose
    oldest token is of weights `max_lag` updates ago or more is brought to its end at once, in a round of its own; where
    a step makes several updates it may be older by those of one step, less one.
    """

    kind = "partial"

    def __init__(
        self,
        *,
        surplus: Annotated[float, Range(0, because="how many more problems than train.prompts are under way")],
        max_lag: Annotated[int, Range(1, because="a rollout goes on as many updates later as a step makes")],
    ) -> None:
        self._share = 1 + Fraction(str(surplus))  # in floating point 1.1 * 50 is more than 55
        self._max_lag = max_lag

    def __call__(self, collection: Collection) -> Rounds:
        held, prompts, groups = self._held, collection.prompts, tuple[Group, ...]()
        old = tuple(group for group in held if _lag(group, collection.version) >= self._max_lag)
        if old:
            groups = tuple((yield Round(resumed=old)))
        rest = tuple(group for group in held if group not in old)
        waiting = rest
        if len(old) < prompts:
            fresh = self._fresh(math.ceil(self._share * prompts), len(held))
            picked = collection.pick(fresh, {group.prompt.id for group in held}) if fresh else ()
            requests = tuple(GroupRequest(prompt, collection.n) for prompt in picked)
            groups = tuple((yield Round(requests, rest, enough=prompts)))
            waiting = tuple(group for group in groups if not group.whole)
        self._held = waiting
        partial = [rollout for group in waiting for rollout in group.partial.rollouts]
        collection.note("carried_rollouts", len(partial))
        collection.note("carried_tokens", sum(map(len, partial)))
        return [group.prompt.id for group in groups if group.whole]

    def _fresh(self, under_way: int, held: int) -> int:
        """How many problems begin, where `under_way` are wanted and `held` go on."""
        return max(0, under_way - held)


def _lag(group: Group, version: int) -> int:
    """Age of a group's oldest token, in updates before `version`; 0 without tokens."""
    spans = [span for rollout in group.rollouts for span in rollout.spans if span.version != GIVEN]
    return max((version - span.version for span in spans), default=0)
