"""One round of `transformers`' own `generate`, which runs the model; what is drawn is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from grpo_cli.model.anatomy import place_of, unwrapped


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
    prompts: Seq[Seq[int]],
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
