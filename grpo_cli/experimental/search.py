"""The base of searches of `grpo eval`: completions of prompts, whole or in parts, and the answers read in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from jaxtyping import Float

from grpo_cli.collect.episodes import play
from grpo_cli.collect.requests import requests_for, seed_of
from grpo_cli.collect.resuming import unstarted, with_limit, without_limit
from grpo_cli.experimental.reading import read
from grpo_cli.interfaces import Runtime
from grpo_cli.model.anatomy import backbone
from grpo_cli.model.checks import context_of
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.answers import final_number, reference_number
from grpo_cli.types import Prompt, Rollout

Replies = list[list[Rollout]]  # of each prompt, in order of the sample number


class Searching:
    """Completions to `prompts`, their answers and their states. It counts the tokens that were sampled, in all
    (`tokens`) and one after the other for each prompt (`sequential`)."""

    def __init__(self, runtime: Runtime, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> None:
        self._runtime, self.prompts, self._sampling, self._seed = runtime, prompts, sampling, seed
        self._problems = {prompt.id: prompt for prompt in prompts}  # and by the ids of what is read in their place
        self.tokens, self.sequential = 0, Counter[str]()

    def begin(self, count: int, contexts: Sequence[Prompt] | None = None, first: int = 0) -> Replies:
        """Return `count` completions to each prompt, without any tokens yet: those that pass@k samples from number
        `first` on. With `contexts` they read these instead, one for each prompt."""
        requests = requests_for(self.prompts, first + count, self._sampling, self._seed, "eval", held_out=True)
        rows = [unstarted(request) for request in requests if request.sample >= first]
        if contexts is not None:
            read = [context for context in contexts for _ in range(count)]
            rows = [replace(row, request=replace(row.request, prompt=p)) for row, p in zip(rows, read, strict=True)]
        return [rows[start : start + count] for start in range(0, len(rows), count)]

    def go_on(self, replies: Replies, tokens: int | None = None) -> Replies:
        """Return partial completions with at most `tokens` more, None: to their ends. The others stay as they are."""
        unfinished = [one for row in replies for one in row if one.is_partial]
        partial = {one.key: one for one in unfinished}
        assert len(partial) == len(unfinished), "a copy has the request, and so the random stream, of its own place"
        short = [one if tokens is None else with_limit(one, len(one) + tokens) for one in partial.values()]
        made = {one.key: one for one in play(self._runtime.engine, self._runtime.task, short)} if short else {}
        assert made.keys() == partial.keys(), "each comes back once"
        longest = Counter[str]()
        for key, one in made.items():
            more, problem = one.num_sampled - partial[key].num_sampled, self._problems[key[0]].id
            self.tokens += more
            longest[problem] = max(longest[problem], more)
            made[key] = one if tokens is None else without_limit(one, partial[key])
        self.sequential += longest
        return [[made.get(one.key, one) for one in row] for row in replies]

    def behind(self, prompt: Prompt, texts: Sequence[Sequence[int]]) -> Prompt:
        """Return the prompt behind these texts, an empty line after each. UserError for a prompt with special tokens,
        whose template would have to hold the texts, and for more tokens than fit."""
        if special := set(prompt.token_ids) & set(self._runtime.tokenizer.all_special_ids):
            shown = ", ".join(self._runtime.tokenizer.convert_ids_to_tokens(sorted(special)))
            raise UserError(
                f"search=pdr puts drafts before plain text, and prompt {prompt.id!r} has {shown}: use search=best"
            )
        gap = self._runtime.tokenizer.encode("\n\n", add_special_tokens=False)
        tokens = (*(token for text in texts for token in (*text, *gap)), *prompt.token_ids)
        most = context_of(self._runtime.model.config) - self._sampling.max_new_tokens
        if len(tokens) > most:
            raise UserError(
                f"search=pdr makes prompt {prompt.id!r} {len(tokens)} tokens long, and {most} fit beside "
                f"sampling.max_new_tokens={self._sampling.max_new_tokens}: lower search.workspace"
            )
        context = Prompt(f"{prompt.id}~{seed_of(*tokens):x}", tokens, prompt.answer)
        self._problems[context.id] = prompt
        return context

    @cached_property
    def has_numbers(self) -> bool:
        """True if every prompt's answer is a number, so that equal ones can be counted."""
        return all(reference_number(prompt.answer) is not None for prompt in self.prompts)

    def answer(self, reply: Rollout) -> str | None:
        """Return the number that a completion ends with; None if there is none, or if the completion was cut off."""
        value = final_number(self._runtime.task.text(reply.turns[-1]))[0] if reply.turns else None
        return str(value) if value is not None and reply.finish.complete else None

    def states(self, replies: Sequence[Rollout]) -> Float[np.ndarray, "N H"]:
        """Return of each the mean of the last layer's states over its own tokens."""
        layers, longest = backbone(self._runtime.model).config.num_hidden_layers, max(map(len, replies))
        found = read(self._runtime, replies, layer=layers, last=longest).features
        return np.split(found, 2, axis=1)[1]  # the first half is of the prompts

    def rng(self, prompt: Prompt) -> np.random.Generator:
        """Return the search's own random stream for a prompt."""
        return np.random.default_rng(seed_of(self._seed, "search", prompt.id))


class SearchMethod(ABC):
    """A search as `interfaces.Search` has it, by the whole completions that it chooses."""

    def __call__(
        self, runtime: Runtime, prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> tuple[Sequence[Rollout], Mapping[str, float]]:
        """Return the chosen completions, and the tokens that they took, means over prompts."""
        searching = Searching(runtime, prompts, sampling, seed)
        chosen = zip(self.choose(searching), prompts, strict=True)  # put under these, whatever was read in their place
        found = [replace(one, request=replace(one.request, prompt=prompt)) for one, prompt in chosen]
        spent = {"tokens": searching.tokens, "sequential": sum(searching.sequential.values())}
        return found, {f"search/{name}": count / len(prompts) for name, count in spent.items()}

    @abstractmethod
    def choose(self, searching: Searching) -> Sequence[Rollout]:
        """Return a whole completion to each prompt, in their order."""
