"""DORA: completions that grow as a tree, with the next ones shared out among directions (`search=dora`, arXiv
2506.15707).

    grow      each unfinished completion by at most `every` tokens
    count     n_i = ceil(n softmax(q / T)_i) from the best down, n being the places and the softmax over the completions
              that are left (REBASE, arXiv 2408.00724); those that get none leave
    share     n_i = round(n s_i), s_i ~ softmax(q / T)_i u_i;  u_i: the i-th diagonal element of softmax(cos / 0.01) by
              rows, so that k completions in one direction have about 1/k each
    answer    when all have ended, the one with the largest sum of q

Ours, in place of a process reward and an embedding model: q, the geometric mean of the tokens' probabilities so far,
and the mean of the last layer's states over the completion. Ours, too: steps of equal length, one T, and the likeliest
completion where no answer is read. The order of the counts, and 0.01, are the released code's, which does not run.

Measured: docs/studies.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, exp
from typing import Annotated, NamedTuple

import numpy as np
from jaxtyping import Float
from pydantic import Field

from grpo_cli.experimental.sample_and_rank import mean_logprob
from grpo_cli.experimental.search import Searching, SearchMethod
from grpo_cli.settings import Samples
from grpo_cli.support.facts import facts
from grpo_cli.support.ranges import Count
from grpo_cli.types import Rollout

SHARPNESS, TINY = 0.01, 1e-30  # what cosines are divided by; the least length of a direction


class Leaf(NamedTuple):
    """An unfinished completion, and its path: the places, from the root on, of the leaves that it has grown from."""

    reply: Rollout
    path: tuple[int, ...]

    @property
    def score(self) -> float:
        return exp(mean_logprob(self.reply))


@facts(resumes=True, one_turn=True)
@dataclass(frozen=True, kw_only=True)
class Tree(SearchMethod):
    """A tree of `width` completions, of which a rule counts those that continue from each leaf."""

    width: Samples
    temperature: Annotated[float, Field(gt=0)]
    every: Count

    def choose(self, searching: Searching) -> list[Rollout]:
        return [voted(searching, row) for row in self._grown(searching)]

    def _grown(self, searching: Searching) -> list[list[Rollout]]:
        """Return `width` whole completions of each prompt, fewer where the rule counts less than there is."""
        begun = searching.begin(self.width)
        trees = [[Leaf(one, ()) for one in row] for row in begun]
        ended: list[list[Rollout]] = [[] for _ in begun]
        step = self.every if self.width > 1 else None  # in one piece, as plain sampling
        while any(trees):
            for number, row in enumerate(searching.go_on([[leaf.reply for leaf in tree] for tree in trees], step)):
                ended[number] += [one for one in row if not one.is_partial]
                moved = [Leaf(one, leaf.path) for one, leaf in zip(row, trees[number], strict=True)]
                trees[number] = [leaf for leaf in moved if leaf.reply.is_partial]
            live = [leaf.reply for tree in trees for leaf in tree]
            states = iter(searching.states(live)) if live else iter(())
            for number, tree in enumerate(trees):
                own = np.array([next(states) for _ in tree])
                taken = {one.request.sample for one in ended[number]}
                free = [one.request for one in begun[number] if one.request.sample not in taken]
                again = self._counts(tree, own, len(free)) if tree else []
                copies = [leaf for leaf, count in zip(tree, again, strict=True) for _ in range(count)]
                # Each continues with the random stream of the place that it takes.
                trees[number] = [
                    Leaf(replace(one.reply, request=request), (*one.path, one.reply.request.sample))
                    for one, request in zip(copies, free, strict=False)
                ]
        return ended

    @abstractmethod
    def _counts(self, leaves: Sequence[Leaf], states: Float[np.ndarray, "L H"], places: int) -> list[int]:
        """Return how many completions continue from each leaf, given their directions and the number of places."""


@dataclass(frozen=True, kw_only=True)
class Dora(Tree):
    """A tree which continues where completions are likely and their directions rare."""

    def _counts(self, leaves: Sequence[Leaf], states: Float[np.ndarray, "L H"], places: int) -> list[int]:
        return shared_out([leaf.score for leaf in leaves], cosines(states), places, self.temperature)


def rebase(scores: Sequence[float], places: int, temperature: float) -> list[int]:
    """Return how many places each has: from the best down, its share of those that are left, rounded up."""
    shares, counts = softmax(np.array(scores) / temperature), [0] * len(scores)
    order = np.argsort(-shares, kind="stable")
    for i, left in zip(order, shares[order][::-1].cumsum()[::-1], strict=True):
        counts[i] = ceil(places * shares[i] / left)
        places -= counts[i]
    return counts


def shared_out(scores: Sequence[float], cos: Float[np.ndarray, "L L"], places: int, temperature: float) -> list[int]:
    """Return how many places each of REBASE's has, by its score and by how few others go its way."""
    left = np.flatnonzero(rebase(scores, places, temperature))
    alone = np.diagonal(softmax(cos[np.ix_(left, left)] / SHARPNESS))
    shares = softmax(np.array(scores)[left] / temperature) * alone
    shares /= shares.sum()
    counts = [0] * len(scores)
    for i in np.argsort(-shares, kind="stable"):
        counts[left[i]] = min(int(places * shares[i] + 0.5), places - sum(counts))
    return counts


def softmax(values: Float[np.ndarray, "*N"]) -> Float[np.ndarray, "*N"]:
    """Compute the softmax over the last axis."""
    powers: np.ndarray = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def cosines(states: Float[np.ndarray, "L H"]) -> Float[np.ndarray, "L L"]:
    """Compute the cosine of each row and each other; 0 for a row of zeros."""
    unit: np.ndarray = states / np.maximum(np.linalg.norm(states, axis=1, keepdims=True), TINY)
    return unit @ unit.T


def voted(searching: Searching, replies: Sequence[Rollout]) -> Rollout:
    """Return the first that gives the answer with the largest sum of scores; without one, the likeliest completion."""
    answers = [searching.answer(one) if searching.has_numbers else None for one in replies]
    votes = dict.fromkeys((answer for answer in answers if answer is not None), 0.0)
    for answer, one in zip(answers, replies, strict=True):
        if answer is not None:
            votes[answer] += exp(mean_logprob(one))
    return replies[answers.index(max(votes, key=votes.__getitem__))] if votes else max(replies, key=mean_logprob)
