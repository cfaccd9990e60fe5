"""The plain collector: every prompt as often as every other."""

from __future__ import annotations

from grpo_cli.interfaces import StepRollouts
from grpo_cli.types import ScoredGroup


def equal(step: StepRollouts) -> list[ScoredGroup]:
    """Return `n` rollouts of each of `train.prompts` prompts (GRPO, arXiv 2402.03300)."""
    return step.score(step.generate((prompt, step.n) for prompt in step.pick(step.prompts)))


def max_rollouts_at_once(collector: object, n: int, prompts: int) -> int:
    """Return the most rollouts that a collector requests at a time: by its own `at_once`, else a plain step's."""
    own = getattr(collector, "at_once", None)
    return int(own(n, prompts)) if own is not None else n * prompts
