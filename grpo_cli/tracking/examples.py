"""Rollouts as readable text: rows of `rollouts.jsonl`, `samples.jsonl` and the table in W&B."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from grpo_cli.interfaces import Task
from grpo_cli.select import Selection
from grpo_cli.types import Example, Rollout, ScoredGroup


def raw_text(task: Task, token_ids: Sequence[int]) -> str:
    """Return what a model read, special tokens included."""
    return str(getattr(task, "raw_text", task.text)(token_ids))


def example(task: Task, group: ScoredGroup, index: int, *, kept: bool, reason: str, advantage: float | None) -> Example:
    """Return one rollout of a scored group as text, and whether it was trained on."""
    rollout, reward = group.rollouts[index], group.rewards[index]
    return Example(
        prompt_id=group.prompt.id,
        sample=rollout.request.sample,
        prompt=raw_text(task, rollout.request.prompt.token_ids),
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
        turns=tuple((by, raw_text(task, ids) if by else task.text(ids)) for by, ids in rollout.parts)
        if len(rollout.parts) > 1
        else None,
    )


NOT_TAKEN = "the collector left its group out of this step"


def examples(
    task: Task, made: Sequence[ScoredGroup], selected: Sequence[Selection], count: int, tokens: bool = False
) -> tuple[Example, ...]:
    """Return rows for `rollouts.jsonl`: the first `count` of the step's rollouts, group by group; all if negative.

    `selected` are the selections of what the collector has taken, which may be groups of earlier steps, with their rows
    in the records of those. With `tokens`, rows hold token ids and log-probabilities too.
    """
    of = {selection.group.prompt.id: selection for selection in selected}
    places = [(group, of.get(group.prompt.id), index) for group in made for index in range(len(group.rollouts))]
    rows = []
    for group, selection, index in places if count < 0 else places[:count]:
        why, advantage = NOT_TAKEN, None
        if selection is not None:
            why = selection.reasons[index]
            if index in selection.indices:
                own = selection.advantages[selection.indices.index(index)].reshape(-1)
                advantage = float(own[: len(group.rollouts[index])].mean())  # the rest is padding
        row = example(task, group, index, kept=not why, reason=why or "kept", advantage=advantage)
        rows.append(_with_tokens(row, group.rollouts[index]) if tokens else row)
    return tuple(rows)


def _with_tokens(row: Example, rollout: Rollout) -> Example:
    logprobs = tuple(None if math.isnan(one) else one for one in rollout.sampler_logprobs)
    ends = accumulate(len(ids) for _, ids in rollout.parts)
    theirs = tuple((end - len(ids), end) for end, (by, ids) in zip(ends, rollout.parts, strict=True) if by)
    return replace(row, token_ids=rollout.token_ids, logprobs=logprobs, environment=theirs or None)
