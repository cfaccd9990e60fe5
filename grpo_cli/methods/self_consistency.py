"""Self-consistency (arXiv 2203.11171): the answer that most of several replies give (`search=majority`).

    answer    argmax over a of the number of replies i = 1..k with a_i = a; of equally frequent ones the first given

Replies in which the judge reads no answer have no vote; where it reads none in any, the first reply is the answer. What
is judged is the first reply that gives the answer. Ours: answers are compared as the judge reads them.

Measured: scripts/reproduce/frontier_c.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_cli.collect.label import winner
from grpo_cli.collect.search import Searching
from grpo_cli.settings import MOST_SAMPLES
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import Range
from grpo_cli.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Majority:
    """Of `k` replies the first that gives the most frequent answer. UserError if the task does not say what it read."""

    k: Annotated[int, Range(1, MOST_SAMPLES, "it is how many replies vote")]

    def __call__(self, searching: Searching) -> list[Rollout]:
        if (read := searching.reader) is None:
            raise UserError(
                "search=majority counts equal answers, and the judge of this task does not say which answer it read in "
                "a reply: use search=best, or a task whose answers are numbers, such as task.reward=numbers"
            )
        return [row[winner([read(one) for one in row])] for row in searching.go_on(searching.begin(self.k))]
