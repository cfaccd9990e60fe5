"""SCOPE (arXiv 2602.24110) without its models: failed completions to unsolved prompts, cut off and made again from
there.

    first round:  n - retries rollouts of each prompt
    second round: of a prompt that none has solved, `retries` failed ones, each cut at random in the first half of what
                  it said first, continue again; of others as many plain ones

The paper cuts at the first wrong step that a process reward model finds, and has a stronger model continue. Ours: where
it cuts, that the policy itself continues, and that the tokens before the cut, which it has sampled, then count as
given.

Not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from grpo_cli.experimental.given import begun_with, num_given
from grpo_cli.interfaces import StepRollouts
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import Count
from grpo_cli.types import Group, Rollout, ScoredGroup


@dataclass(frozen=True)
class Repair:
    """`n` rollouts of each prompt, the last `retries` of them repaired ones where none of the others is right."""

    retries: Count

    resumes: ClassVar[bool] = True

    def __call__(self, step: StepRollouts) -> list[ScoredGroup]:
        if (first := step.n - self.retries) < 1:
            raise UserError(f"collector.retries={self.retries} of n={step.n} rollouts leave none to repair: take fewer")
        requests: list[Group | tuple] = []
        for group in step.score(step.generate((prompt, first) for prompt in step.pick(step.prompts))):
            failed = [] if group.solved else step.rng.choice(first, self.retries, replace=self.retries > first).tolist()
            tried = [beginning(group.rollouts[place], step.rng) for place in failed]
            begun = [(place, tokens) for place, tokens in zip(failed, tried, strict=True) if tokens]
            again = [
                begun_with(group.rollouts[place].request, tokens, first + number, "repair")
                for number, (place, tokens) in enumerate(begun)
            ]
            requests += [Group(group.prompt, tuple(again))] * bool(again)
            requests.append((group.prompt, self.retries - len(again)))
        groups = step.score(step.generate(requests))
        pairs = [pair for group in groups for pair in zip(group.rollouts, group.rewards, strict=True)]
        if repaired := [reward.solved for rollout, reward in pairs if num_given(rollout)]:
            step.note("repaired", sum(repaired) / len(repaired))
        return groups


def beginning(rollout: Rollout, rng: np.random.Generator) -> tuple[int, ...]:
    """Return from one token to half of the rollout's first turn; nothing of a turn of one token."""
    said = rollout.turns[0] if rollout.turns else ()
    return said[: int(rng.integers(1, len(said) // 2 + 1))] if len(said) > 1 else ()
