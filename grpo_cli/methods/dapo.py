"""DAPO's dynamic sampling: problems whose answers are all equally good are replaced by others (arXiv 2503.14476).

    mixed: the group's answers are not all equally good (penalties do not count)
    a round generates ceil((1 + surplus) * (prompts - mixed so far)) groups

The rest of DAPO is `loss=dapo` (more room upwards, a mean over tokens) and the reward part `overlong`
(`tasks/formats.py`).

Measured: docs/studies.md (no gain in accuracy seen at equal tokens; what is dropped is paid for).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from grpo_cli.collect.requests import with_surplus
from grpo_cli.interfaces import StepRollouts
from grpo_cli.types import ScoredGroup


@dataclass(frozen=True)
class Dynamic:
    """Rounds until `train.prompts` groups are mixed; the others are dropped, as are mixed ones beyond.

    With `surplus` (ours: the release generates as many in each round, three times a step's) a round is of what is
    lacking. Once the run or the task has no more, the step trains on the mixed groups that there are; with none at all
    it is a plain step without a gradient.
    """

    surplus: Annotated[float, Field(ge=0, le=1000)]
    most_rounds: Annotated[int, Field(ge=1, le=1000)]

    def at_once(self, n: int, prompts: int) -> int:
        return n * with_surplus(prompts, self.surplus)

    def __call__(self, step: StepRollouts) -> list[ScoredGroup]:
        mixed, others = list[ScoredGroup](), list[ScoredGroup]()
        for _ in range(self.most_rounds):
            lacking = step.prompts - len(mixed)
            picked = () if lacking <= 0 or step.at_limit else step.pick(with_surplus(lacking, self.surplus))
            if not picked:
                break
            for group in step.score(step.generate((prompt, step.n) for prompt in picked)):
                (mixed if step.differs(group) else others).append(group)
        return (mixed or others)[: step.prompts]
