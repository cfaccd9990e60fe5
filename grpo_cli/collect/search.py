"""Search at evaluation (`search`): more than one reply to a problem, of which one is the answer that is judged.

A search sees no reward, since that is what is measured. Methods are in `methods/`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from grpo_cli.collect.episodes import play
from grpo_cli.collect.requests import in_context, requests_for, seed_of
from grpo_cli.collect.resuming import begun, limited, unlimited
from grpo_cli.interfaces import Engine, Task
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Finish, Prompt, Request, Rollout

Replies = list[list[Rollout]]  # of each problem, in order of the sample number


@runtime_checkable
class Reads(Task, Protocol):
    """A task whose judge reads an answer in a reply, and compares nothing but that."""

    @property
    def reads(self) -> Callable[[Rollout], str | None] | None:
        """The answer in a reply, None where there is none: equal texts are right or wrong together. None in its place:
        this judge does not say."""


class Searching:
    """What a search may use: replies to `prompts`, whole or in parts, and what the judge reads in them. It counts the
    tokens that were drawn, in all (`tokens`) and one after the other for each problem (`sequential`)."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int,
        max_prompt_tokens: int | float = math.inf,
        read_states: Callable[[Sequence[Rollout]], Float[np.ndarray, "N H"]] | None = None,
    ) -> None:
        self._most, self._read_states = max_prompt_tokens, read_states
        self._engine, self._task, self._sampling, self._seed = engine, task, sampling, seed
        self.prompts = prompts
        self.tokens, self.sequential = 0, Counter[str]()

    def begin(self, count: int, contexts: Sequence[Prompt] | None = None, first: int = 0) -> Replies:
        """`count` replies to each problem, without any tokens yet: those that pass@k samples from number `first` on.
        With `contexts` they read these instead, one for each problem."""
        requests = requests_for(self.prompts, first + count, self._sampling, self._seed, "eval", held_out=True)
        rows = [begun(request) for request in requests if request.sample >= first]
        if contexts is not None:
            read = [context for context in contexts for _ in range(count)]
            rows = [begun(_reading(one.request, context)) for one, context in zip(rows, read, strict=True)]
        return [rows[start : start + count] for start in range(0, len(rows), count)]

    def go_on(self, replies: Replies, tokens: int | None = None) -> Replies:
        """Partial replies with at most `tokens` more, None: to their ends. The others are returned as they are."""
        unfinished = [one for row in replies for one in row if one.finish is Finish.PARTIAL]
        partial = {_key(one): one for one in unfinished}
        assert len(partial) == len(unfinished), "a copy has the request, and so the random stream, of its own place"
        short = [one if tokens is None else limited(one, len(one) + tokens) for one in partial.values()]
        made = {_key(one): one for one in play(self._engine, self._task, short)} if short else {}
        assert made.keys() == partial.keys(), "each comes back once"
        longest = Counter[str]()
        for key, one in made.items():
            more, prompt = one.num_drawn - partial[key].num_drawn, key[0]
            self.tokens += more
            longest[prompt] = max(longest[prompt], more)
            made[key] = one if tokens is None else unlimited(one, partial[key])
        self.sequential += longest
        return [[made.get(_key(one), one) for one in row] for row in replies]

    def in_context(self, prompt: Prompt, texts: Sequence[str | Sequence[int]]) -> Prompt:
        """The problem behind these texts, or the texts of these tokens. UserError if the task cannot, or if it does not
        fit."""
        context = in_context(self._task, "the search", prompt, texts)
        if len(context.token_ids) > self._most:
            raise UserError(
                f"the search puts texts before problem {prompt.id!r} that make it {len(context.token_ids)} tokens, and "
                f"{self._most} fit beside sampling.max_new_tokens={self._sampling.max_new_tokens}: lower it, "
                "or search.workspace"
            )
        return context

    @property
    def reader(self) -> Callable[[Rollout], str | None] | None:
        """What reads the answer of a reply (see `Reads`), None if the task does not say it."""
        return self._task.reads if isinstance(self._task, Reads) else None

    def states(self, rollouts: Sequence[Rollout]) -> Float[np.ndarray, "N H"]:
        """Of each the mean of the last layer's hidden states over its own tokens: a pass of the model. UserError where
        there is no model to read."""
        if self._read_states is None:
            raise UserError("the search reads hidden states, and none can be read here; use search=majority or best")
        return self._read_states(rollouts)

    def rng(self, prompt: Prompt) -> np.random.Generator:
        """The search's own random stream for a problem."""
        return np.random.default_rng(seed_of(self._seed, "search", prompt.id))


@runtime_checkable
class Search(Protocol):
    """Which whole rollout is the answer to each problem, in their order. None: nothing is searched."""

    def __call__(self, searching: Searching) -> Sequence[Rollout] | None: ...


def no_search(searching: Searching) -> None:
    """Only the plain answers are evaluated."""


def _reading(request: Request, context: Prompt) -> Request:
    return replace(request, prompt=context, problem=request.prompt)


def _key(rollout: Rollout) -> tuple[str, int]:
    return rollout.request.about.id, rollout.request.sample
