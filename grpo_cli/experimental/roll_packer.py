"""RollPacker's tail batching: what takes long is set aside and made together, in rare steps (arXiv 2509.21009).

    short step: ceil((1 + surplus) * prompts) prompts under way, until `prompts` groups are whole; the rest is dropped
                and its prompts are set aside
    long step:  once `prompts` prompts are set aside, these alone, each to its end

Read from the abstract, secondary sources and the settings of its release. Left out: more than n rollouts of a prompt,
of which the first n to end are kept, which favours short ones. Ours: a prompt that was set aside is answered again from
the random streams that it had, since with others long answers would be sampled again until they are short.

Measured: docs/studies.md (no difference in accuracy seen, fewer decode steps; embedded model).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_cli.collect.requests import with_surplus
from grpo_cli.collect.resuming import unstarted
from grpo_cli.collect.stored import HoldsGroups
from grpo_cli.interfaces import StepRollouts, facts
from grpo_cli.support.errors import UserError
from grpo_cli.types import Group, ScoredGroup


@facts(stops=True)
class Tail(HoldsGroups):
    """Short steps end with the first `train.prompts` groups; those of the others are generated again in long steps
    (tail batching, arXiv 2509.21009). All tokens that are trained on are of the step's own weights.

    Groups that are whole at the same moment are all trained on. What is set aside when the run ends never was.
    """

    kind, held = "tail", "aside"

    def __init__(self, *, surplus: Annotated[float, Field(ge=0, le=1)]) -> None:
        self._surplus = surplus

    def at_once(self, n: int, prompts: int) -> int:
        return n * with_surplus(prompts, self._surplus)

    def __call__(self, step: StepRollouts) -> list[ScoredGroup]:
        if step.prompts == 1:
            raise UserError("collector=tail needs train.prompts=2 or more: with 1 half of its steps would be long")
        aside, late = self._held, list[Group]()
        is_long = len(aside) >= step.prompts
        if is_long:
            groups = step.generate(aside[: step.prompts])
            self._held = aside[step.prompts :]
        else:
            picked = step.pick(with_surplus(step.prompts, self._surplus), {group.prompt.id for group in aside})
            groups = step.generate(((prompt, step.n) for prompt in picked), enough=step.prompts)
            late = [group for group in groups if not group.whole]
            # From their first token on: the random streams are those that they had.
            self._held = (*aside, *(Group(g.prompt, tuple(unstarted(r.request) for r in g.rollouts)) for g in late))
        step.note("long_step", is_long)
        step.note("set_aside", len(self._held))
        step.note("tokens_dropped", sum(rollout.num_sampled for group in late for rollout in group.rollouts))
        return step.score(group for group in groups if group.whole)
