"""The state of rules that learn from a run's steps, and its place in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_cli.interfaces import Observes, Parts, Task
from grpo_cli.support.errors import UserError
from grpo_cli.types import ScoredGroup


def observing(parts: Parts) -> dict[str, Observes]:
    """Return the rules that learn, by their groups."""
    named = {"curriculum": parts.curriculum, **vars(parts.rules)}
    return {name: rule for name, rule in named.items() if isinstance(rule, Observes)}


def observe(
    parts: Parts, step: int, collected: Sequence[ScoredGroup], finished: Sequence[ScoredGroup]
) -> dict[str, float]:
    """Pass a step's groups to every rule that learns from them; return the rules' metrics."""
    parts.runtime.history.observe(step, finished)
    metrics = dict[str, float]()
    for name, rule in observing(parts).items():
        metrics |= rule.observe(step, finished if name == "curriculum" else collected)
    return metrics


def state_of(parts: Parts, digest: str) -> dict[str, Any]:
    """Return what a checkpoint keeps: the history, each rule's state, and which prompts these are of."""
    state = {"history": parts.runtime.history.state_dict(), "task": digest}
    return state | {name: rule.state_dict() for name, rule in observing(parts).items()}


def digest_of(task: Task) -> str:
    """Return a digest of a task's number of prompts, and of the first, the middle and the last of them, which some
    tasks take long to make."""
    prompts = task.prompts("train")
    some = [prompts[place] for place in (0, len(prompts) // 2, len(prompts) - 1)] if len(prompts) else []
    text = repr([len(prompts), [(prompt.id, prompt.token_ids, prompt.answer) for prompt in some]])
    return hashlib.sha256(text.encode()).hexdigest()


def restore(parts: Parts, state: Mapping[str, Any], digest: str) -> None:
    """Restore what `state_of` returned. UserError if it is of another task or of other rules."""
    rules = observing(parts)
    if state["task"] != digest:
        raise UserError(
            "the checkpoint is of other problems: resume with its task and seed, or give model.path=<checkpoint>"
        )
    for name in state.keys() - rules.keys() - {"history", "task"}:
        kind = state[name].get("kind")
        raise UserError(f"the checkpoint holds what {name}={kind} has learnt: resume with it, or start a new run")
    parts.runtime.history.load_state_dict(state["history"])
    for name, rule in rules.items():
        rule.load_state_dict(state.get(name))
