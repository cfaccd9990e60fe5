"""Speculative decoding (`engine.draft`): the next tokens of the running rows are guessed, and one pass checks them all.

Each token is drawn from the policy with its request's own number, as it is without drafts; drafts are kept as far as
they are the tokens drawn. So a rollout's tokens are those that it would have had, and drafts only decide how many of
them a pass makes. A fixed guess is kept with the policy's probability of it, as by the rejection sampling of Leviathan
et al. (arXiv 2211.17192); a drafter that draws uses the same number (a coupling: Daliri et al., arXiv 2408.07978) and
loses somewhat more than rejection sampling would.

When it pays is the rule of EfficientRollout (arXiv 2606.18967), with seconds measured while rollouts are made:

    L / (gamma r + v) > 1,    L = (1 - a^(gamma + 1)) / (1 - a)

a: share of tested drafts that are kept; gamma: drafts of a row; r, v: seconds of a draft and of a check over those of
a plain step. Ours: a row without a guess counts as a test that failed; v = 1 + s gamma, with s measured; gamma is the
one for which the gain is largest; and an account of what drafts have saved and lost, which bounds what they may lose.

Measured: scripts/reproduce/frontier_d.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from grpo_cli.support.ranges import OneOf

Kind = Annotated[str, OneOf(("none", "ngram", "self"))]
DRAFTER: Literal["int4"] = "int4"  # the rounding of draft=self
GAMMAS = (1, 3, 5, 7, 9, 11)
FIRST = 5  # of a trial
LEAST, LONGEST = 2, 12  # tokens that a guess by n-grams follows
MOST_ROWS = 64  # of a checking pass, if there are no more slots
PLAIN_STEPS = 4  # before the first trial with about so many rows
REFRESH = 16  # every so many steps is plain where drafts pay, and a trial where they did not
LOSS = 0.01  # the share of all seconds that drafts may have lost, in trials or where the measured gain is wrong
WEIGHT = 0.2  # of a new measurement in a running average
PRIOR = 6.0, 10.0  # drafts kept and tested before any was: one short row may not end trials
FADES = 0.99  # what earlier ones count after another pass


def speedup(a: float, gamma: int, r: float, v: float) -> float:
    """Tokens a row makes in the time of a plain step.

    >>> [round(speedup(0.8, gamma, 0.35, 1.05), 3) for gamma in (3, 5, 7)]
    [1.406, 1.318, 1.189]
    """
    return sum(a**k for k in range(gamma + 1)) / (gamma * r + v)


def guess(text: np.ndarray, behind: Sequence[int], most: int) -> list[int]:
    """What followed the last tokens of `behind` in `text` (-1: the end of a part of it), where most of them are the
    same: of these places the token that follows most often, and what came after it. Empty if fewer than `LEAST` match.

    >>> guess(np.array([1, 2, 3, 4, -1, 1, 2, 3, 5, 6, -1, 2, 3, 5, 7, -1]), [9, 2, 3], 3)
    [5, 7]
    """
    at = np.flatnonzero(text[:-1] == behind[-1])
    at, matching = at[text[at + 1] >= 0], 1
    while len(at) and matching < min(LONGEST, len(behind)):
        longer = at[at >= matching]
        longer = longer[text[longer - matching] == behind[-1 - matching]]
        if not len(longer):
            break
        at, matching = longer, matching + 1
    if not len(at) or matching < LEAST:
        return []
    tokens, counts = np.unique(text[at + 1], return_counts=True)
    place = int(at[text[at + 1] == tokens[counts.argmax()]][-1]) + 1
    found = text[place : place + most]
    return found[: int((found < 0).argmax()) if (found < 0).any() else most].tolist()


@dataclass
class Costs:
    """Running averages, with about so many rows: seconds of a plain step; r and s as above, None before a trial."""

    plain: float | None = None
    r: float | None = None
    s: float | None = None
    steps: int = 0
    checks: int = 0

    def gain(self, a: float, gamma: int) -> float:
        assert self.r is not None and self.s is not None, "it was tried"
        return speedup(a, gamma, self.r, 1 + self.s * gamma)


class Pays:
    """Decides how many tokens are drafted for each row."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._costs: dict[int, Costs] = {}  # by the rows' number of binary digits
        self._kept, self._tested = PRIOR
        self._seconds = self._saved = 0.0

    def gamma(self, rows: int, slots: int) -> int:
        """Drafts for each of these rows in the next step; 0: none."""
        costs = self._of(rows)
        possible = [gamma for gamma in GAMMAS if (gamma + 1) * rows <= max(MOST_ROWS, slots)]
        if not possible or costs.steps < PLAIN_STEPS:
            return 0
        if -self._saved > LOSS * self._seconds:
            return 0
        if costs.r is None:
            return min(possible[-1], FIRST)
        gain, best = max((costs.gain(self._kept / self._tested, gamma), gamma) for gamma in possible)
        turn = costs.steps % REFRESH == 0
        if gain > 1:
            return 0 if turn else best
        hopeless = all(costs.gain(1.0, gamma) <= 1 for gamma in possible)
        return best if turn and not hopeless else 0

    def plain(self, rows: int, seconds: float) -> None:
        """A step without drafts took so long."""
        costs = self._of(rows)
        costs.steps += 1
        if costs.steps > 1:  # the first one prepares products of a new size
            costs.plain = _average(costs.plain, seconds)
        self._seconds += seconds

    def checked(self, gamma: int, drafts: Sequence[int], kept: Sequence[int], drafting: float, seconds: float) -> None:
        """One pass has checked so many `drafts` of each row, of which it `kept` so many. Seconds of drafting, and of
        both."""
        rows, passed = len(drafts), sum(kept)
        costs = self._of(rows)
        assert costs.plain is not None, "plain steps come first"
        costs.steps += 1
        costs.checks += 1
        self._kept = FADES * self._kept + passed
        self._tested = FADES * self._tested + sum(min(k + 1, gamma) for k in kept)
        if costs.checks > 1:  # as above
            costs.r = _average(costs.r, drafting / costs.plain / gamma)
            costs.s = _average(costs.s, max(0.0, (seconds - drafting) / costs.plain - 1) / gamma)
        # A pass ends when its last row does, so only what the slowest row gained is sure to save steps.
        self._account(seconds, (1 + min(kept)) * costs.plain)

    def lose(self, seconds: float) -> None:
        """What drafts took beside any step."""
        self._account(seconds, 0.0)

    def _account(self, seconds: float, plain: float) -> None:
        """So many seconds did what plain steps would have done in so many others. Gains of long ago are no licence."""
        self._seconds += seconds
        self._saved = min(self._saved + plain - seconds, LOSS * self._seconds)

    def _of(self, rows: int) -> Costs:
        return self._costs.setdefault(rows.bit_length(), Costs())


def _average(before: float | None, now: float) -> float:
    return now if before is None else (1 - WEIGHT) * before + WEIGHT * now


def leading(drafts: Sequence[int], drawn: np.ndarray, ends: frozenset[int]) -> int:
    """How many drafts are the tokens drawn, none of which comes after an end.

    >>> leading([5, 6, 7], np.array([5, 6, 1, 2]), frozenset()), leading([5, 6], np.array([5, 6, 1]), frozenset({5}))
    (2, 0)
    """
    for place, token in enumerate(drafts):
        if token != drawn[place] or token in ends:
            return place
    return len(drafts)
