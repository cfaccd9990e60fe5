"""Parallel-Distill-Refine (arXiv 2510.01123): drafts are put before the prompt, which is then answered again.

    draft     `drafts` completions to each prompt
    distill   the `keep` likeliest of them, by the mean log-probability of a token; of each the last workspace / keep
              tokens
    refine    `drafts` completions to the prompt behind these, again `rounds` times, the last time one, which is the
    answer

In the paper a model writes the workspace. Ours: its content, and that a prompt is plain text. One draft is sequential
refinement (arXiv 2504.07052).

Measured: docs/studies.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_cli.experimental.sample_and_rank import mean_logprob
from grpo_cli.experimental.search import Searching, SearchMethod
from grpo_cli.settings import Samples
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import facts
from grpo_cli.support.ranges import Count
from grpo_cli.types import Finish, Prompt, Rollout


@facts(one_turn=True)
@dataclass(frozen=True, kw_only=True)
class Pdr(SearchMethod):
    """The answer of `rounds` rounds of refinement. UserError if no token of a draft would be shown."""

    drafts: Samples
    keep: Count
    rounds: Count
    workspace: Count

    def __post_init__(self) -> None:
        if not self.keep <= min(self.drafts, self.workspace):
            raise UserError(
                f"search.keep={self.keep} drafts are more than search.drafts={self.drafts}, or than the tokens of "
                f"search.workspace={self.workspace}: keep fewer"
            )

    def choose(self, searching: Searching) -> list[Rollout]:
        replies = searching.go_on(searching.begin(self.drafts))
        for number in range(1, self.rounds + 1):
            contexts = [self._before(searching, *one) for one in zip(searching.prompts, replies, strict=True)]
            count = self.drafts if number < self.rounds else 1
            replies = searching.go_on(searching.begin(count, contexts, first=number * self.drafts))
        return [row[0] for row in replies]

    def _before(self, searching: Searching, prompt: Prompt, drafts: Sequence[Rollout]) -> Prompt:
        best = sorted(drafts, key=mean_logprob, reverse=True)[: self.keep]
        texts = (one.token_ids[: len(one) - (one.finish is Finish.EOS)] for one in best)
        return searching.behind(prompt, [text[-(self.workspace // self.keep) :] for text in texts])
