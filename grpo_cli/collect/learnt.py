"""What the rules of a run learn from its steps, and what of that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grpo_cli.collect.same import OtherProblems
from grpo_cli.interfaces import Forgets, Marks, Parts, Remembers
from grpo_cli.support.errors import UserError
from grpo_cli.types import ScoredGroup


def remembering(parts: Parts) -> Iterator[tuple[str, Remembers]]:
    """The rules that learn, by their groups."""
    named = {"curriculum": parts.curriculum, "replay": parts.replay, **vars(parts.rules)}
    yield from ((name, rule) for name, rule in named.items() if isinstance(rule, Remembers))


def observe(parts: Parts, step: int, trained: Sequence[ScoredGroup], made: Sequence[ScoredGroup]) -> dict[str, float]:
    """Show a step's groups to every rule that learns from them; returns the rules' metrics. The history, curricula and
    credits, which learn how hard a problem is, see rollouts without help alone."""
    alone = _unaided(made)
    parts.history.observe(step, alone)
    shown = {"curriculum": alone, "credit": _unaided(trained)}
    seen = [(rule, shown.get(name, trained)) for name, rule in remembering(parts)]
    return {name: value for rule, groups in seen for name, value in rule.observe(step, groups).items()}


def _unaided(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Return the groups with only the rollouts that were made without help, those that have any."""
    alone = [group.take([place for place, one in enumerate(group.rollouts) if one.unaided]) for group in groups]
    return [group for group in alone if group.rollouts]


def mark(parts: Parts) -> Callable[[], dict[str, Any]]:
    """A function that returns the rules' state as of now; valid until the next mark."""
    learnt = {"history": parts.history.mark()} | {name: _marked(rule) for name, rule in remembering(parts)}
    return lambda: {name: dict(state()) for name, state in learnt.items()}


def _marked(rule: Remembers) -> Callable[[], Mapping[str, Any]]:
    if isinstance(rule, Marks):
        return rule.mark()
    state = rule.state_dict()
    return lambda: state


def put_back(parts: Parts, state: Mapping[str, Any]) -> None:
    """Restore the state that a mark returned; empty if the checkpoint is older than all such state. What it says of
    problems that this run's task does not have is dropped."""
    rules = dict(remembering(parts))
    for name in state.keys() - rules.keys() - {"history"}:
        kind = state[name].get("kind")
        raise UserError(
            f"the checkpoint holds what {name}={kind} has learnt, and this run's {name} learns nothing; resume "
            f"with {name}={kind}, or start a new run"
        )
    if "history" in state:
        parts.history.load_state_dict(state["history"])
    for name, rule in rules.items():
        rule.load_state_dict(state.get(name))
    is_other = OtherProblems(parts.bench.task.prompts("train"), parts.history.digests)
    parts.history.forget(is_other)
    for rule in rules.values():
        if isinstance(rule, Forgets):
            rule.forget(is_other)
    if count := len(is_other.found):
        parts.warn(
            f"{count} of the problems in the checkpoint are not in this run's task, or not with the same prompt "
            "and answer: what was seen and learnt of them is dropped, with their stored and partial groups. To "
            "keep it, resume with the task as it was"
        )
