"""Rollouts as a person reads them: rows of `rollouts.jsonl`, of `samples.jsonl` and of the table in W&B."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_cli.interfaces import Task
from grpo_cli.select import Selection
from grpo_cli.types import Example, ScoredGroup


def example(task: Task, group: ScoredGroup, index: int, *, kept: bool, reason: str, advantage: float | None) -> Example:
    """One rollout of a scored group as a person reads it, and what became of it."""
    rollout, reward = group.rollouts[index], group.rewards[index]
    return Example(
        prompt_id=group.prompt.id,
        sample=rollout.request.sample,
        prompt=task.text(group.prompt.token_ids),
        reply=task.text(rollout.token_ids),
        answer=group.prompt.answer,
        reward=reward.total,
        solved=reward.solved,
        parts=dict(reward.parts),
        length=len(rollout),
        finish=rollout.finish.value,
        kept=kept,
        reason=reason,
        advantage=advantage,
    )


def examples(task: Task, selected: Sequence[Selection], count: int) -> tuple[Example, ...]:
    """Rows for `rollouts.jsonl`: `count` spread evenly over the step's rollouts, all if it is negative."""
    places = [(selection, index) for selection in selected for index in range(len(selection.group.rollouts))]
    if 0 <= count < len(places):
        places = [places[i * len(places) // count] for i in range(count)]
    rows = []
    for selection, index in places:
        why = selection.reasons[index]
        advantage = None
        if index in selection.indices:
            advantage = float(selection.advantages[selection.indices.index(index)])
        row = example(task, selection.group, index, kept=not why, reason=why or "kept", advantage=advantage)
        rows.append(row)
    return tuple(rows)
