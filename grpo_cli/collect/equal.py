"""The plain collector: every problem as often as every other."""

from __future__ import annotations

from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.types import GroupRequest, Round


def equal(collection: Collection) -> Rounds:
    """`n` rollouts of each of `train.prompts` problems, in one round (GRPO, arXiv 2402.03300)."""
    yield Round(tuple(GroupRequest(prompt, collection.n) for prompt in collection.pick(collection.prompts)))
    return None
