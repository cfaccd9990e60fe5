"""DOTS' replay: groups of earlier steps take the place of some new ones (`collector=fifo`; arXiv 2506.05316).

    new prompts = max(ceil(fresh * prompts), prompts - stored groups);  the others are stored groups, sampled uniformly

Left out: the adaptive choice of prompts, which is `curriculum=target`, and DART-GUI's rescue of failed groups. The
paper's loss is correction=decoupled; optim.ess=sqrt is the companion where updates are large.

Measured: docs/studies.md (accuracy was lower).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Annotated

from pydantic import Field

from grpo_cli.collect.stored import HoldsGroups
from grpo_cli.interfaces import StepRollouts
from grpo_cli.methods.april import lag
from grpo_cli.support.ranges import Count
from grpo_cli.types import ScoredGroup


@dataclass(kw_only=True)
class GroupStore(HoldsGroups):
    """A share of the step's prompts is new, and stored groups take the place of the others; too few are filled up.

    A group is stored unless all its rewards are equal: the newest of each prompt, and the oldest go beyond `capacity`.
    It keeps its log-probabilities and rewards. One whose oldest token is of weights more than `max_lag` updates ago is
    dropped. A new group of a stored group's prompt replaces it, and then the step has one group less.
    """

    kind, held = "fifo", "stored"
    fresh: Annotated[float, Field(gt=0, le=1)]
    capacity: Count
    max_lag: Annotated[int | None, Field(ge=1)]

    def __call__(self, step: StepRollouts) -> list[ScoredGroup]:
        most = step.version if self.max_lag is None else self.max_lag
        stored = [group for group in self._held if lag(group, step.version) <= most]
        count = max(ceil(Fraction(str(self.fresh)) * step.prompts), step.prompts - len(stored))
        groups = step.score(step.generate((prompt, step.n) for prompt in step.pick(count)))
        new = {group.prompt.id for group in groups}
        others = [group for group in stored if group.prompt.id not in new]
        places = step.rng.permutation(len(others))[: max(step.prompts - len(groups), 0)]
        self._held = tuple([*others, *(group for group in groups if group.rewards_differ)][-self.capacity :])
        return [*groups, *(others[place] for place in sorted(places))]
