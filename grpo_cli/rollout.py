"""Prompts to requests with their seeds, rollouts to groups, groups to scored groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from grpo_cli.downsample import check_rewards
from grpo_cli.interfaces import Task
from grpo_cli.settings import Sampling
from grpo_cli.types import Group, Prompt, Request, Rollout, ScoredGroup


def seed_of(*names: object) -> int:
    """A 64-bit seed that is a function of names and nothing else: the same on every machine and in every process."""
    text = "/".join(str(name) for name in names)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def requests_for(prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int, step: int | str) -> list[Request]:
    """`n` requests per prompt, prompt by prompt; randomness is a function of (seed, step, prompt, sample)."""
    return [
        Request(prompt, sample, seed_of(seed, step, prompt.id, sample), sampling)
        for prompt in prompts
        for sample in range(n)
    ]


def group_rollouts(prompts: Sequence[Prompt], rollouts: Iterable[Rollout]) -> list[Group]:
    """Rollouts in any order to one group per prompt, in the order of `prompts` and of the samples."""
    of: dict[str, list[Rollout]] = {prompt.id: [] for prompt in prompts}
    for rollout in rollouts:
        of[rollout.request.prompt.id].append(rollout)
    return [
        Group(prompt, tuple(sorted(of[prompt.id], key=lambda rollout: rollout.request.sample))) for prompt in prompts
    ]


def score(task: Task, group: Group) -> ScoredGroup:
    """Judge every rollout of a group. A reward that is not a finite number is an error, never a zero."""
    rewards = tuple(task.reward(group.prompt, rollout) for rollout in group.rollouts)
    scored = ScoredGroup(group.prompt, group.rollouts, rewards)
    check_rewards(scored)
    return scored
