"""One round of `transformers`' own `generate`, which runs the model; what is drawn and who ends is decided here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from grpo_cli.engine.step.sample import SamplingTable, uniforms
from grpo_cli.model.anatomy import place_of, unwrapped
from grpo_cli.types import Finish, Request, Rollout


class Drawing:
    """What is drawn for each row, and which have ended. `ended` has rows in the order of their ends; a row that has
    ended is computed on until all have, and what comes of it is dropped."""

    def __init__(
        self,
        requests: Sequence[Request],
        eos: frozenset[int],
        decode: Callable[[Sequence[int]], str] | None,
        enough: Callable[[Rollout], bool] | None,
        device: torch.device,
    ) -> None:
        self.requests, self.steps, self.stopped = requests, 0, False
        self.most = max(request.sampling.max_new_tokens for request in requests)
        self.ended: list[tuple[int, Finish]] = []
        self._eos, self._decode, self._enough = eos, decode, enough
        self._open = list(range(len(requests)))
        self._made: list[tuple[list[int], list[float]]] = [([], []) for _ in requests]
        self._table = SamplingTable(len(requests), device)
        self._table.put(self._open, [request.sampling for request in requests])
        self._uniforms = torch.from_numpy(uniforms([request.seed for request in requests], self.most)).to(device)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row so far."""
        return [len(tokens) for tokens, _ in self._made]

    def draw(self, logits: Tensor) -> Tensor:
        """A token for each row; writes it down for those that have not ended, and who ends with it."""
        tokens, logprobs = self._table.draw(logits, self._uniforms[:, self.steps], slice(None))
        self.steps += 1
        drawn, said = tokens.tolist(), logprobs.tolist()
        for row in self._open:
            self._made[row][0].append(drawn[row])
            self._made[row][1].append(said[row])
        for row in tuple(self._open):
            finish = self._finish(row)
            if finish is not None:
                self._open.remove(row)
                self.ended.append((row, finish))
                if self._enough is not None and not self.stopped:
                    self.stopped = self._enough(self.rollout(row, finish))
        return tokens

    @property
    def over(self) -> bool:
        return self.stopped or not self._open

    def _finish(self, row: int) -> Finish | None:
        request, tokens = self.requests[row], self._made[row][0]
        if tokens[-1] in self._eos:
            return Finish.EOS
        if request.sampling.stop and self._says_stop(request, tokens):
            return Finish.STOP
        return Finish.LENGTH if len(tokens) == request.sampling.max_new_tokens else None

    def _says_stop(self, request: Request, tokens: Sequence[int]) -> bool:
        """Looks at as many tokens as hold the longest string; some of the turn may have been made before."""
        assert self._decode is not None, "an engine that is given stop strings is given the means to read"
        before = request.prompt.token_ids[len(request.prompt.token_ids) - request.in_turn :]
        longest = max(len(string.encode()) for string in request.sampling.stop)
        text = self._decode([*before, *tokens][-longest - 1 :])
        return any(string in text for string in request.sampling.stop)

    def rollout(self, row: int, finish: Finish) -> Rollout:
        """What a row has come to."""
        tokens, logprobs = self._made[row]
        return Rollout(self.requests[row], tuple(tokens), tuple(logprobs), finish, max(0, len(tokens) - 1))


class _Draws(LogitsProcessor):
    """In place of logits, ones of which the greatest is the token that was drawn."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        self._draw = draw

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.zeros_like(scores).scatter_(1, self._draw(scores)[:, None], 1.0)


class _Ends(StoppingCriteria):
    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), self._over(), device=input_ids.device)


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    pad: int,
    most: int,
    draw: Callable[[Tensor], Tensor],
    over: Callable[[], bool],
) -> int:
    """Have the model read the prompts, padded on the left, and continue them by what `draw` makes of logits
    [rows, vocabulary], until it is `over` or has gone on for `most` tokens. Returns the bytes of its cache."""
    width, device, inner = max(map(len, prompts)), place_of(model), unwrapped(model)
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    with _undisturbed(inner):
        made = inner.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=pad,
            return_dict_in_generate=True,
            logits_processor=LogitsProcessorList([_Draws(draw)]),
            stopping_criteria=StoppingCriteriaList([_Ends(over)]),
        )
    # transformers calls it `cache` since 5.24
    return _bytes_of(made["cache" if "cache" in made else "past_key_values"], set())


@contextmanager
def _undisturbed(inner: Any) -> Iterator[None]:
    """Without what the model's own generation config does to logits (penalties, forbidden tokens, truncation)."""
    own, inner.generation_config = inner.generation_config, GenerationConfig()
    try:
        yield
    finally:
        inner.generation_config = own


def _bytes_of(cache: Any, seen: set[int]) -> int:
    """Of all tensors in it, each once: every family keeps something else."""
    if id(cache) in seen or isinstance(cache, type):
        return 0
    seen.add(id(cache))
    if isinstance(cache, Tensor):
        return cache.nbytes
    parts = cache.values() if isinstance(cache, dict) else cache if isinstance(cache, list | tuple) else ()
    inside = vars(cache).values() if hasattr(cache, "__dict__") else ()
    return sum(_bytes_of(part, seen) for part in (*parts, *inside))
