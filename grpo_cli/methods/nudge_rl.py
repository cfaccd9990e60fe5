"""NudgeRL (arXiv 2605.15726): short strategies before the problem, compared with each other and taught without them.

    collector:  per_problem hints of a list for each problem, n / per_problem rollouts with each; every rollout drops
                its hint with the chance `drop`
    advantage:  A = (r - mean_c) + between (mean_c - mean) with hint c, r - mean without one; then
                (A - mean of A) / (std of A + 1e-5), the std not corrected, all over the problem's rollouts
    train.plain_weight = 0.1: the same rollouts again under the plain prompt, with that weight and the same A

Checked against the paper's release, which also doubles the rows that dropped their hint, and does not clip them; here
the plain rows are of rollouts with a hint alone. Ours: the hints that ship, where the paper has them written by a
stronger model for each problem, and that a list serves all problems, of which each draws its own. The release truncates
with top_p=0.95, for which training needs sampling.kept_set=true here.

Not measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.rules.advantage import varies
from grpo_cli.rules.arms import arm, arm_means, needs_arms, reward_by_arm
from grpo_cli.runs.files import regular
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import Others, facts
from grpo_cli.support.ranges import Count, Range, Share
from grpo_cli.types import AdvantageInputs, GroupRequest, Prompt, Round

EPS = 1e-5


def _goes_with(own: Mapping[str, Any], others: Others) -> Iterator[str]:
    count = own.get("per_problem")
    if isinstance(count, int) and (count > others.n or others.n % count):
        yield f"collector.per_problem={count} hints do not share n={others.n} rollouts evenly: take a divisor of n"


@facts(arms=True, goes_with=_goes_with)
class Nudge:
    """n rollouts of each problem, shared by `per_problem` hints (a list, or a file with one in each line), which each
    rollout drops with the chance `drop`, and all of a problem that it does not fit before. UserError for too few
    hints."""

    def __init__(self, *, hints: str | Sequence[str], per_problem: Count, drop: Share) -> None:
        self._hints = _read(hints) if isinstance(hints, str) else [*dict.fromkeys(map(str, hints))]
        self._per_problem, self._drop = per_problem, drop
        if len(self._hints) < per_problem:
            named = hints if isinstance(hints, str) else list(hints)
            raise UserError(
                f"collector.hints={named} holds {len(self._hints)} different hints, and collector.per_problem="
                f"{per_problem}: give as many, one in each line, or lower it"
            )

    def __call__(self, collection: Collection) -> Rounds:
        prompts = collection.pick(collection.prompts)
        groups = yield Round(tuple(one for prompt in prompts for one in self._requests(collection, prompt)))
        rollouts = [one for group in groups for one in group.rollouts]
        collection.note("hinted", sum(one.request.problem is not None for one in rollouts) / len(rollouts))
        for figure, mean in reward_by_arm(collection.score(groups)).items():
            collection.note(figure, mean)
        return None

    def _requests(self, collection: Collection, prompt: Prompt) -> Iterator[GroupRequest]:
        hints = collection.rng.choice(len(self._hints), self._per_problem, replace=False).tolist()
        kept = collection.rng.random(collection.n) >= self._drop
        counts = Counter(hints[place % len(hints)] if keep else None for place, keep in enumerate(kept))
        for hint in (None, *hints):
            if counts[hint]:
                context = None if hint is None else collection.in_context(prompt, [self._hints[hint]])
                fits = context is not None and len(context.token_ids) <= collection.max_prompt_tokens
                yield GroupRequest(prompt, counts[hint], context if fits else None)


def _read(file: str) -> list[str]:
    """The different lines of a file, without blank ones. UserError if it cannot be read."""
    try:
        with open(Path(file).expanduser(), encoding="utf-8", opener=regular) as lines:
            return [*dict.fromkeys(line.strip() for line in lines if line.strip())]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(
            f"collector.hints={file} cannot be read: {reason}; give a text file with a hint in each line, or a list"
        ) from error


@facts(divides=True, goes_with=needs_arms)
def nudge(
    kept_rewards: Float[Tensor, " K"],
    group_rewards: Float[Tensor, " G"],
    *,
    between: Annotated[float, Range(0, because="it is how much a hint counts for being better than others")],
    inputs: AdvantageInputs,
) -> Float[Tensor, " K"]:
    """Better than with the same hint, and by a hint that is better than the others; whitened."""
    if not varies(group_rewards):
        return torch.zeros_like(kept_rewards)
    rewards, rollouts = group_rewards.double(), [inputs.group.rollouts[place] for place in inputs.baseline]
    means, mean = arm_means(rewards, inputs), rewards.mean()
    centres = [
        mean if one.request.problem is None else (1 - between) * means[arm(one)] + between * mean for one in rollouts
    ]
    raw = rewards - torch.stack(centres)
    white = (raw - raw.mean()) / (raw.std(correction=0) + EPS)
    places = [inputs.baseline.index(place) for place in inputs.kept]
    return white[places].to(kept_rewards.dtype)
