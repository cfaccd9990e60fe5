"""XRPO: a bonus for right answers that were unlikely in their group, rollouts in rounds, each to the problem whose
solved share it narrows most, and solved examples before unsolved problems (arXiv 2510.06672).

    novelty   A + min(bonus * max(0, 1 - exp(s - mean(s))), cap * A)  if solved and A > 0;  s: mean log-probability
    ci        the k-th rollout is worth sqrt(p (1 - p)) (h(k-1) - h(k)) + explore sqrt(ln K / (k-1)),
              h(k) = t_.975 / sqrt(k),  p = (solved + 1) / (tried + 2),  K: rollouts so far in the step

Not measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.collect.apportion import hand_out, in_proportion
from grpo_cli.history import of_kind
from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.rules.advantage import Epsilon, StatsOver, grpo
from grpo_cli.rules.arms import reward_by_arm
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import facts
from grpo_cli.support.intervals import student_95
from grpo_cli.support.ranges import Count, Range
from grpo_cli.types import AdvantageInputs, GroupRequest, Prompt, Rollout, Round, ScoredGroup

NotNegative = Range(0, because="a right answer is not to lose by being rare")


@facts(divides=True)
def novelty(
    kept_rewards: Float[Tensor, " K"],
    group_rewards: Float[Tensor, " G"],
    inputs: AdvantageInputs,
    *,
    stats_over: StatsOver,
    eps: Epsilon,
    bonus: Annotated[float, NotNegative],
    cap: Annotated[float, NotNegative],
) -> Float[Tensor, " K"]:
    """That of `grpo`, and more for right answers that were unlikely in their group, by the log-probabilities of the
    tokens as they were drawn; the mean is over the compared rollouts. That the cap is relative to A is ours.
    """
    advantages = grpo(kept_rewards, group_rewards, stats_over=stats_over, eps=eps).double()
    likely = torch.tensor([_mean_logprob(rollout) for rollout in inputs.group.rollouts]).double()
    solved = torch.tensor([reward.solved for reward in inputs.group.rewards])
    kept = list(inputs.kept)
    compared = likely[kept if stats_over == "kept" else list(inputs.baseline)]
    relative = likely[kept] - compared[~compared.isnan()].mean()
    more = rarity_bonus(advantages, relative, bonus, cap).nan_to_num(0.0)  # one that was given whole is not rare
    return torch.where(solved[kept], advantages + more, advantages).to(kept_rewards.dtype)


def rarity_bonus(
    advantages: Float[Tensor, " K"], relative: Float[Tensor, " K"], bonus: float, cap: float
) -> Float[Tensor, " K"]:
    """min(bonus * max(0, 1 - exp(relative)), cap * advantage), and 0 where the advantage is not above 0."""
    return torch.minimum(bonus * (1 - relative.exp()).clamp(min=0), cap * advantages.clamp(min=0))


def _mean_logprob(rollout: Rollout) -> float:
    """The mean over sampled tokens; NaN if all were given."""
    if not rollout.token_ids:
        return 0.0
    drawn = [logprob for logprob in rollout.sampler_logprobs if not math.isnan(logprob)]
    return sum(drawn) / len(drawn) if drawn else math.nan


def ci(
    collection: Collection,
    *,
    rounds: Count,
    most: int | None,
    explore: Annotated[float, Range(0, because="it favours problems that were tried little")],
) -> Rounds:
    """As many rollouts as a plain step has, in `rounds` parts; after the first, which all problems share alike, each
    goes to where it narrows the interval of the solved share most. The deviation is that of (solved + 1) of (tried +
    2), since one answer says nothing of it."""
    n, prompts = collection.n, collection.prompts
    room = 2 * n if most is None else most
    if room < n:
        raise UserError(
            f"collector.most={room} is less than n={n}, the mean size of a group: take collector.most of {n} or more"
        )
    budget, rng = n * prompts, collection.rng
    first = min(budget, max(2 * prompts, budget // rounds))
    begun = in_proportion(np.ones(prompts), first, 2, rng)
    picked = collection.pick(prompts)
    groups = yield Round(tuple(GroupRequest(prompt, count) for prompt, count in zip(picked, begun, strict=True)))
    for left in range(rounds - 1, 0, -1):
        made = sum(len(group.rollouts) for group in groups)
        part = (budget - made) // left
        if not part:
            continue
        have = [len(group.rollouts) for group in groups]
        solved = [scored.solved for scored in collection.score(groups)]
        gains = [_gains(right, tried, made, room, explore) for right, tried in zip(solved, have, strict=True)]
        counts = hand_out(gains, have, part, rng)
        more = zip(groups, counts, have, strict=True)
        groups = yield Round(tuple(GroupRequest(g.prompt, new - old) for g, new, old in more if new > old))
    return None


@facts(arms=True, contexts=True)
class Icl:
    """Half of n rollouts of each problem; of those that none solves the others come behind solved problems that are
    like it, of earlier steps (XRPO's seeding).

    Like it by BM25 over the tokens of their prompts (see `bm25`), among the last `memory` problems that were solved, of
    each its last right reply. They are fewer than `examples`, or none, where no more are known or fit. Ours: the half,
    the memory, and that the other problems' rollouts are plain.
    """

    def __init__(self, *, examples: Count, memory: Count) -> None:
        self._count, self._memory = examples, memory
        self._solved: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # by problem, the newest last

    def __call__(self, collection: Collection) -> Rounds:
        first = collection.n // 2
        if not first:
            raise UserError("collector=icl makes half of n rollouts first, and n=1 has no half: take n of 2 or more")
        prompts = collection.pick(collection.prompts)
        groups = yield Round(tuple(GroupRequest(prompt, first) for prompt in prompts))
        contexts = [None if g.solved else self._behind_examples(collection, g.prompt) for g in collection.score(groups)]
        rest = collection.n - first
        groups = yield Round(tuple(GroupRequest(p, rest, c) for p, c in zip(prompts, contexts, strict=True)))
        collection.note("hinted", sum(c is not None for c in contexts) * rest / (collection.n * len(prompts)))
        for figure, mean in reward_by_arm(collection.score(groups)).items():
            collection.note(figure, mean)
        return None

    def _behind_examples(self, collection: Collection, prompt: Prompt) -> Prompt | None:
        others = [solved for name, solved in self._solved.items() if name != prompt.id]
        scores = bm25(prompt.token_ids, [asked for asked, _ in others])
        best = sorted(range(len(others)), key=lambda place: -scores[place])[: self._count]
        for count in range(len(best), 0, -1):
            context = collection.in_context(prompt, [(*others[i][0], *others[i][1]) for i in best[:count]])
            if len(context.token_ids) <= collection.max_prompt_tokens:
                return context
        return None

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        for group in groups:
            right = [one for one, reward in zip(group.rollouts, group.rewards, strict=True) if reward.solved]
            if right:
                self._solved.pop(group.prompt.id, None)
                self._solved[group.prompt.id] = group.prompt.token_ids, right[-1].token_ids
        self._solved = dict([*self._solved.items()][-self._memory :])
        return {}

    def forget(self, is_other: Callable[[str], bool]) -> None:
        """As `interfaces.Forgets` has it."""
        self._solved = {name: solved for name, solved in self._solved.items() if not is_other(name)}

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "icl", "solved": [(name, *map(list, solved)) for name, solved in self._solved.items()]}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        stored = of_kind(state, "collector", "icl")["solved"]
        self._solved = {name: (tuple(asked), tuple(said)) for name, asked, said in stored}


def bm25(query: Sequence[int], texts: Sequence[Sequence[int]], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """How well each text answers the query: the sum over its different words of
    ln(1 + (N - n + 1/2) / (n + 1/2)) f (k1 + 1) / (f + k1 (1 - b + b length / mean length)), for a word that n of N
    texts hold, this one f times (Robertson and Zaragoza 2009)."""
    counts = [Counter(text) for text in texts]
    mean = sum(map(len, texts)) / max(1, len(texts))
    scores = [0.0] * len(texts)
    for word in dict.fromkeys(query):
        holds = sum(word in of for of in counts)
        rarity = math.log(1 + (len(texts) - holds + 0.5) / (holds + 0.5))
        for place, of in enumerate(counts):
            if f := of[word]:
                scores[place] += rarity * f * (k1 + 1) / (f + k1 * (1 - b + b * len(texts[place]) / mean))
    return scores


def _gains(solved: int, tried: int, made: int, most: int, explore: float) -> list[float]:
    """What a problem's k-th rollout is worth, for k up to `most`; 0 for those that it has."""
    share = (solved + 1) / (tried + 2)
    deviation = math.sqrt(share * (1 - share))
    worth = [
        deviation * narrowing(k - 1) + explore * math.sqrt(math.log(made) / (k - 1)) for k in range(tried + 1, most + 1)
    ]
    return [0.0] * (min(tried, most) + 1) + worth


@cache
def narrowing(count: int) -> float:
    """By how much one more than `count` answers (2 or more) of deviation 1 narrow half the 95 % interval of their mean,
    t_{.975} / sqrt(count)."""
    return _half_width(count) - _half_width(count + 1)


def _half_width(count: int) -> float:
    return student_95(count - 1) / math.sqrt(count)
