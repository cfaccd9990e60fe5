"""APRIL: a step ends before its longest rollouts do, which continue in the next (arXiv 2509.18521).

    in flight = ceil((1 + surplus) * prompts);  a step ends when `prompts` groups are whole
    a held group whose oldest token has lag >= max_lag updates is finished first

Measured: docs/studies.md (no difference in accuracy seen, fewer decode steps).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from grpo_cli.collect.requests import with_surplus
from grpo_cli.collect.stored import HoldsGroups
from grpo_cli.interfaces import StepRollouts
from grpo_cli.types import Group, ScoredGroup


class Partial(HoldsGroups):
    """`1 + surplus` times a plain step's problems are under way, and a step ends when a plain step's number of groups
    is whole (APRIL, arXiv 2509.18521). The others are held, with the rollouts that have ended and those that have not,
    and go on first in the next step.

    Groups that are whole at the same moment are all trained on: nothing is lost, and nothing comes twice. Where a step
    makes several updates, a held group may be older than `max_lag` by those of one step, less one.
    """

    kind = "partial"
    stops: ClassVar[bool] = True
    resumes: ClassVar[bool] = True

    def __init__(self, *, surplus: Annotated[float, Field(ge=0)], max_lag: Annotated[int, Field(ge=1)]) -> None:
        self._surplus, self._max_lag = surplus, max_lag

    def at_once(self, n: int, prompts: int) -> int:
        return n * with_surplus(prompts, self._surplus)

    def __call__(self, step: StepRollouts) -> list[ScoredGroup]:
        old = [group for group in self._held if lag(group, step.version) >= self._max_lag]
        waiting = [group for group in self._held if group not in old]
        whole = [*step.generate(old)]
        if len(old) < step.prompts:
            fresh = self._fresh(with_surplus(step.prompts, self._surplus), len(self._held))
            picked = step.pick(fresh, {group.prompt.id for group in self._held})
            requests = [*waiting, *((prompt, step.n) for prompt in picked)]
            groups = step.generate(requests, enough=step.prompts - len(old))
            whole += [group for group in groups if group.whole]
            waiting = [group for group in groups if not group.whole]
        self._held = tuple(waiting)
        partial = [rollout for group in waiting for rollout in group.partial.rollouts]
        step.note("carried_rollouts", len(partial))
        step.note("carried_tokens", sum(map(len, partial)))
        return step.score(whole)

    def _fresh(self, under_way: int, held: int) -> int:
        """Return how many problems begin, where `under_way` are wanted and `held` go on."""
        return max(0, under_way - held)


def lag(group: Group | ScoredGroup, version: int) -> int:
    """Return the age of a group's oldest sampled token, in updates before `version`; 0 without such tokens."""
    spans = [span for rollout in group.rollouts for span in rollout.spans if span.version >= 0]
    return max((version - span.version for span in spans), default=0)
