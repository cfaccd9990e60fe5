"""A step's prompts, requests with their seeds, rollouts to groups, groups to scored groups."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import starmap
from typing import Any

import numpy as np

from grpo_cli.interfaces import BatchTask, Task
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError, own_code_unless_ours
from grpo_cli.support.facts import name_of
from grpo_cli.types import LARGEST_REWARD, Group, Prompt, Request, Reward, Rollout, ScoredGroup


def seed_of(*names: object) -> int:
    """Return a 64-bit seed, a function of the names, the same on every machine and in every process."""
    text = "/".join(str(name) for name in names)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def check_ids(prompts: Iterable[Prompt], which: str) -> None:
    """Raise UserError for a prompt without tokens, and for two of one id, which identifies seeds, groups and what is
    learnt."""
    numbers: dict[str, int] = {}
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt.token_ids, tuple):
            raise UserError(f"prompt {prompt.id!r} has a {type(prompt.token_ids).__name__} of token_ids: give a tuple")
        if not prompt.token_ids:
            raise UserError(f"prompt {prompt.id!r} has no tokens: give at least one")
        first = numbers.setdefault(prompt.id, number)
        if first != number:
            raise UserError(
                f"{prompt.id!r} is the id of two of the {which} (numbers {first} and {number}): let the task give each "
                "prompt of a split its own"
            )


def requests_for(
    prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int, step: int | str, held_out: bool = False
) -> list[Request]:
    """Return `n` requests per prompt, prompt by prompt; randomness is a function of (seed, step, prompt, sample)."""
    check_ids(prompts, "prompts evaluated together")
    return [
        Request(prompt, sample, seed_of(seed, step, prompt.id, sample), sampling, held_out)
        for prompt in prompts
        for sample in range(n)
    ]


def group_rollouts(prompts: Sequence[Prompt], rollouts: Iterable[Rollout]) -> list[Group]:
    """Group rollouts in any order by prompt, in order of `prompts` and samples."""
    of: dict[Prompt, list[Rollout]] = {prompt: [] for prompt in prompts}
    for rollout in rollouts:
        prompt = rollout.request.prompt
        assert prompt in of, f"a rollout of a prompt that was not requested: {prompt.id}"
        of[prompt].append(rollout)
    return [Group(prompt, tuple(sorted(of[prompt], key=lambda rollout: rollout.request.sample))) for prompt in prompts]


def score_all(task: Task, groups: Sequence[Group]) -> list[ScoredGroup]:
    """Judge every rollout of many groups, all at once if the task can. UserError for a reward that is not finite."""
    pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    with own_code_unless_ours(f"task {name_of(task)}", task):
        given: list[Any] = [*(task.rewards(pairs) if isinstance(task, BatchTask) else starmap(task.reward, pairs))]
    if len(given) != len(pairs):
        raise UserError(f"the task's rewards returned {len(given)} for {len(pairs)} rollouts: return one for each")
    if wrong := [one for one in given if not isinstance(one, Reward)]:
        raise UserError(f"the task's reward returned {wrong[0]!r:.40}: return a Reward of grpo_cli.types")
    rewards = iter(given)
    scored = [ScoredGroup(g.prompt, g.rollouts, tuple(next(rewards) for _ in g.rollouts)) for g in groups]
    for group in scored:
        check_rewards(group)
    return scored


def check_rewards(group: ScoredGroup) -> None:
    """Raise UserError for a NaN, infinite or huge reward, which would silently destroy the weights."""
    bad = np.flatnonzero(~(np.abs(group.totals) <= LARGEST_REWARD))
    if len(bad):
        first = int(bad[0])
        raise UserError(
            f"the task gave reward {group.totals[first]} to sample {group.rollouts[first].request.sample} of prompt "
            f"{group.prompt.id}: let it return finite numbers from -2^53 to 2^53"
        )


def only_judged(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Keep the rollouts that have a judgement."""
    judged = [group.take([i for i, one in enumerate(group.rewards) if one.judged]) for group in groups]
    return [group for group in judged if group.rollouts]


def check_sampling(request: Request, now: Sampling) -> None:
    """Raise UserError if a resumed rollout began with other sampling settings."""
    begun = vars(request.sampling)
    if changed := [key for key, value in vars(now).items() if begun[key] != value]:
        before, here = (" ".join(f"sampling.{key}={of[key]}" for key in changed) for of in (begun, vars(now)))
        raise UserError(f"rollouts of prompt {request.prompt.id!r} began with {before}, not {here}: resume with that")


class Goal:
    """A goal: `enough` more groups are whole, as the rollouts `under_way` end."""

    def __init__(self, enough: int, under_way: Iterable[Rollout]) -> None:
        self._lacking = enough
        self._left = Counter(rollout.request.prompt.id for rollout in under_way)

    def __call__(self, rollout: Rollout) -> bool:
        name = rollout.request.prompt.id
        self._left[name] -= 1
        self._lacking -= not self._left[name]
        return self._lacking <= 0


def with_surplus(count: int, surplus: float) -> int:
    """Return `1 + surplus` times a number, rounded up.

    >>> with_surplus(50, 0.1)  # in floating point 1.1 * 50 is more than 55
    55
    """
    return math.ceil((1 + Fraction(str(surplus))) * count)
