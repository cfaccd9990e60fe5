"""ADHint (arXiv 2512.13095): the harder a problem is, the more of a worked solution its later replies begin with.

    d = 1 - solved share of a first round, without hints
    w = clip(least + (most - least) d + noise N(0, 1), 0, most)
    second round: replies that begin with the first floor(w L) tokens of the problem's solution of L tokens, given
    advantage: r - mean of its own arm: a context, and whether the reply was given a beginning
    credit: given tokens count 0 where A < 0, so that a correct hint is never trained against, else 1

Read from the paper's text. Ours: one w for all of a problem's second round, how many replies are in the first, all
numbers in the YAML, that the difficulty is a share of right answers, and that nothing of the last line is ever given.
Left out: how the paper weighs its two arms, which was not recovered, and its modulation of given tokens by their
entropy beside that of the continuation.

Not measured, but for one seed of experiment=hint_arithmetic against collector=equal, on sums of 9 and 10 terms at 1.5 M
generated tokens: pass@1 0.385 (0.31 to 0.47) against 0.023 (0.01 to 0.05), greedy accuracy 0.48 against 0.02. All of it
was gained on sums of 9 terms: in the last 15 steps 0.75 of 63 recorded plain replies to those were right, and none of
65 to 10 terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.history import History
from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.rules.arms import arm, arm_means, needs_arms, reward_by_arm
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import facts
from grpo_cli.support.ranges import Count, OneOf, Range, Share
from grpo_cli.types import GIVEN, AdvantageInputs, Batch, GroupRequest, Prompt, Round


@facts(arms=True)
def hint(
    collection: Collection,
    *,
    plain: Count | None,
    least: Share,
    most: Annotated[float, Range(0, 1, "it is a share of a worked solution", above=True)],
    noise: Annotated[float, Range(0, 1)],
    only_unsolved: bool,
    given: Annotated[str, OneOf(("answer", "prompt"))],
) -> Rounds:
    """`plain` rollouts of each problem (None: half of n), then the others with a hint: at the beginning of the reply
    (`given` answer) or in a text before the problem (prompt). Without a solution, or with nothing of it, they are plain
    as well. UserError where no problem of the step has a solution."""
    if least > most:
        raise UserError(f"collector.least={least} is more than collector.most={most}: lower it")
    first = _first(collection.n, plain)
    prompts = collection.pick(collection.prompts)
    solutions = {prompt.id: tuple(collection.solution(prompt)) for prompt in prompts}
    groups = yield Round(tuple(GroupRequest(prompt, first) for prompt in prompts))
    scored = collection.score(groups)
    shares = [share(1 - g.solved / len(g.rollouts), least, most, noise * collection.rng.normal()) for g in scored]
    shares = [0.0 if only_unsolved and g.solved else w for g, w in zip(scored, shares, strict=True)]
    hints = [
        solutions[g.prompt.id][: int(w * len(solutions[g.prompt.id]))] for g, w in zip(scored, shares, strict=True)
    ]
    asked = zip(groups, hints, strict=True)
    groups = yield Round(
        tuple(_hinted(collection, group.prompt, collection.n - first, begins, given) for group, begins in asked)
    )
    parts = [len(begins) / max(1, len(solutions[g.prompt.id])) for g, begins in zip(groups, hints, strict=True)]
    collection.note("hint_share", float(np.mean(parts)))
    for figure, mean in reward_by_arm(collection.score(groups)).items():
        collection.note(figure, mean)
    return None


def _first(n: int, plain: int | None) -> int:
    first = n // 2 if plain is None else plain
    if not 1 <= first < n:
        raise UserError(
            f"collector.plain={first} rollouts of a problem without a hint leave none of n={n} with one, or are none: "
            "take from 1 to n - 1, and n of 2 or more"
        )
    return first


def share(difficulty: float, least: float, most: float, noise: float = 0.0) -> float:
    """How much of a solution is given.

    >>> [share(d, 0.0, 0.8) for d in (0.0, 0.25, 0.5, 1.0)]
    [0.0, 0.2, 0.4, 0.8]
    """
    return min(max(least + (most - least) * difficulty + noise, 0.0), most)


def _hinted(collection: Collection, prompt: Prompt, count: int, begins: tuple[int, ...], given: str) -> GroupRequest:
    if not begins or given == "answer":
        return GroupRequest(prompt, count, prefix=begins)
    return GroupRequest(prompt, count, collection.in_context(prompt, [begins]))


@facts(divides=False, goes_with=needs_arms)
def arms(
    kept_rewards: Float[Tensor, " K"], group_rewards: Float[Tensor, " G"], *, inputs: AdvantageInputs
) -> Float[Tensor, " K"]:
    """Reward minus the mean of its own arm, undivided; an arm of one rollout has the advantage 0."""
    means = arm_means(group_rewards, inputs)
    return kept_rewards - torch.stack([means[arm(inputs.group.rollouts[place])] for place in inputs.kept])


def right_hints(batch: Batch, problems: Sequence[str], history: History) -> Float[Tensor, "B T"] | None:
    """Given tokens count nothing in a rollout that is worse than its like."""
    if batch.lags is None:
        return None
    return 1.0 - ((batch.lags == GIVEN) & (batch.advantages < 0)[:, None]).float()
