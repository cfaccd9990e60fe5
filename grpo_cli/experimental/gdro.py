"""Rollout-GDRO: rollouts by the deviation of a problem's outcomes (`collector=sqrt`; arXiv 2601.19280).

    rollouts ~ max(sqrt(p (1 - p)), floor), at least `least`, n per problem on average

The square root is what the theory of Rollout-GDRO comes to: with a fixed number of rollouts, the variance of a step's
gradient is least in this proportion. The paper itself learns its allocation with a bandit whose fixed point this is.

Not measured.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from grpo_cli.experimental.apportion import in_proportion
from grpo_cli.interfaces import StepRollouts
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import facts
from grpo_cli.support.ranges import Range
from grpo_cli.types import ScoredGroup

FEWEST = 2  # rollouts of a problem; one has nothing to be compared with


@facts(unequal=True)
def by_deviation(
    step: StepRollouts,
    *,
    floor: Annotated[float, Range(0, 0.5, "0.5 is the largest deviation there is", above=True)],
    least: Annotated[int, Range(FEWEST, because="one rollout has nothing to be compared with")],
    decay: Annotated[float, Range(0, 1, "with 0 the last visit alone counts, with 1 all count alike")],
) -> list[ScoredGroup]:
    """p is the decayed mean of the problem's earlier visits, 1/2 before the first; `floor` is the least deviation."""
    if least > step.n:
        raise UserError(f"collector.least={least} is more than n={step.n}, the mean size of a group: lower it")
    prompts = step.pick(step.prompts)
    rates = np.array([step.history.rate(prompt.id, decay) for prompt in prompts])
    shares = np.maximum(np.sqrt(rates * (1 - rates)), floor)
    counts = in_proportion(shares, step.n * len(prompts), least, step.rng)
    return step.score(step.generate(zip(prompts, counts, strict=True)))
