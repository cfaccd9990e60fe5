"""SCOPE (arXiv 2602.24110) without its models: failed replies to unsolved problems, cut off and made anew from there.

    first round:  n - retries rollouts of each problem
    second round: of a problem that none has solved, `retries` failed ones, each cut at random in the first half of what
                  it said first, go on anew; of others as many plain ones

The paper cuts at the first wrong step that a process reward model finds, and has a stronger model go on. Ours: where
it cuts, that the policy itself goes on, and that the tokens before the cut, which it has drawn, then count as given:
they stay in the loss without a correction.

Not measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import facts
from grpo_cli.support.ranges import Count
from grpo_cli.types import GroupRequest, Rollout, Round, ScoredGroup


@facts(arms=True)
def repair(collection: Collection, *, retries: Count) -> Rounds:
    """`n` rollouts of each problem, the last `retries` of them repaired ones where none of the others is right."""
    if retries >= collection.n:
        raise UserError(
            f"collector.retries={retries} of n={collection.n} rollouts leave none to repair: take fewer, or a larger n"
        )
    first, rng = collection.n - retries, collection.rng
    groups = yield Round(tuple(GroupRequest(p, first) for p in collection.pick(collection.prompts)))
    requests = [one for group in collection.score(groups) for one in _again(group, retries, rng)]
    groups = yield Round(tuple(requests))
    repaired = [
        group.rewards[i].solved for group in collection.score(groups) for i, r in enumerate(group.rollouts) if r.given
    ]
    if repaired:
        collection.note("repaired", sum(repaired) / len(repaired))
    return None


def _again(group: ScoredGroup, count: int, rng: np.random.Generator) -> Iterator[GroupRequest]:
    if group.solved:
        yield GroupRequest(group.prompt, count)
        return
    size = len(group.rollouts)
    for place in rng.choice(size, count, replace=count > size):
        yield GroupRequest(group.prompt, 1, prefix=beginning(group.rollouts[place], rng))


def beginning(rollout: Rollout, rng: np.random.Generator) -> tuple[int, ...]:
    """From one token to half of the rollout's first turn; nothing of a turn of one token."""
    said = rollout.turns[0] if rollout.turns else ()
    return said[: int(rng.integers(1, len(said) // 2 + 1))] if len(said) > 1 else ()
