"""Self-consistency (arXiv 2203.11171): the answer that most of several completions give (`search=majority`).

    answer    argmax over a of the number of completions i = 1..k with a_i = a; of equally frequent ones the first given

Completions that end in no number, or were cut off, have no vote; without any vote the first completion is the answer.
What is judged is the first completion that gives the answer. Ours: answers are numbers, compared exactly (1/2 is 0.5).

Measured: docs/studies.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_cli.experimental.search import Searching, SearchMethod
from grpo_cli.settings import Samples
from grpo_cli.support.errors import UserError
from grpo_cli.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Majority(SearchMethod):
    """The first of `k` completions that gives the most frequent answer. UserError for answers that are no numbers."""

    k: Samples

    def choose(self, searching: Searching) -> list[Rollout]:
        if not searching.has_numbers:
            raise UserError("search=majority counts equal numbers, and an answer of this task is none: use search=best")
        return [row[winner([*map(searching.answer, row)])] for row in searching.go_on(searching.begin(self.k))]


def winner(answers: Sequence[str | None]) -> int:
    """Return the place of the first of the most frequent answers.

    >>> winner([None, "7", "5", "5", None, None, "7"]), winner([None, None])
    (1, 0)
    """
    votes = Counter(answer for answer in answers if answer is not None)  # in order of their first vote
    return answers.index(max(votes, key=lambda answer: votes[answer])) if votes else 0
