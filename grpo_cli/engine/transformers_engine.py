"""Rollouts by the model's own `generate`, for families whose layers nothing else here knows.

`transformers` runs the model and keeps its cache; tokens are sampled here, as in the torch engine. So they are a
function of the weights and the request, to rounding: other rows of a round change the shapes of products, which may
change a token where a number falls on the border of two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from grpo_cli.engine.common import EngineParts, check_context
from grpo_cli.engine.samplers import Sampler
from grpo_cli.engine.sampling import draw, row_sampling, uniforms
from grpo_cli.engine.sequence import Sequence
from grpo_cli.engine.serving import Serving, ServingEngine
from grpo_cli.interfaces import facts
from grpo_cli.model.anatomy import backbone, can_pack, head, unwrapped
from grpo_cli.model.checks import context_of
from grpo_cli.support.errors import UserError, explained
from grpo_cli.types import Request

_LONG, _SHORT, _MADE = 9, 4, 3  # tokens of two trial prompts, and of their completions
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # of the range of the logits, by the weights


@facts(any_family=True)
class GenerateEngine(ServingEngine):
    """Whole rounds, each decoded to the end of its longest reply. The modules are the trainer's own."""

    choice = "generate"

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        model = parts.model
        self._pads = may_be_padded(model, parts.pad_token_id)
        apart = "" if self._pads else f", and {type(unwrapped(model)).__name__} takes prompts of one length at a time"
        better = "; engine=torch serves this model, too" if can_pack(model) else ""
        parts.warn(f"engine=generate is slow: every completion waits for the longest of its round{apart}{better}")

    @classmethod
    def refuses(cls, *, sampler: Sampler, **others: Any) -> Iterator[str]:
        yield from super().refuses(sampler=sampler, **others)
        if sampler.refills and not sampler.all_at_once:
            name = type(sampler).__name__.lower()
            yield f"sampler={name} refills slots, which engine=generate cannot do; choose sampler=micro or sampler=full"
        if sampler.kv_budget is not None:
            yield f"sampler.kv_budget={sampler.kv_budget} is not supported by engine=generate; use sampler.slots"

    def _start(self, requests: Seq[Request]) -> Mapping[str, float]:
        check_context(requests, context_of(unwrapped(self._parts.model).config))
        self._slots = self._parts.sampler.slots_for(len(requests), self._parts.rollouts_per_step)
        self._kv_bytes = 0
        return {}

    def _advance(self, serving: Serving, entered: Seq[Sequence]) -> None:
        """Bring a round to its end, in parts within the context, where the longest prompt meets the longest reply.
        Prompts that may not be padded are in parts of one length."""
        context, parts = context_of(unwrapped(self._parts.model).config), list[list[Sequence]]()
        for sequence in sorted(entered, key=lambda one: one.prompt_length):
            together = [*parts[-1], sequence] if parts else [sequence]
            fits = sequence.prompt_length + max(one.limit for one in together) <= context
            if parts and fits and (self._pads or together[0].prompt_length == sequence.prompt_length):
                parts[-1] = together
            else:
                parts.append([sequence])
        for part in parts:
            if not serving.stopped:
                self._round(serving, part)

    def _round(self, serving: Serving, sequences: Seq[Sequence]) -> None:
        """Call the model's `generate` once. A row that has ended is computed on until all have, and its further tokens
        are dropped."""
        settings, device = [sequence.request.sampling for sequence in sequences], self._parts.model.device
        most, by = max(sequence.limit for sequence in sequences), row_sampling(settings, device)
        uniform = torch.from_numpy(uniforms([sequence.request.seed for sequence in sequences], most)).to(device)
        steps = iter(range(most))

        def drawn(logits: Tensor) -> Tensor:
            tokens, logprobs = draw(logits, uniform[:, next(steps)], by)
            serving.tally.steps += 1
            serving.tally.row_steps += sum(sequence.finish is None for sequence in sequences)
            for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
                serving.add(sequence, token, logprob)
            return tokens

        def over() -> bool:
            return serving.stopped or all(sequence.finish for sequence in sequences)

        prompts = [sequence.request.prompt.token_ids for sequence in sequences]
        cache = generate(self._parts.model, prompts, self._parts.pad_token_id, most, drawn, over)
        self._kv_bytes = max(self._kv_bytes, cache)
        serving.tally.prefilled += sum(map(len, prompts))

    def facts(self) -> Mapping[str, Any]:
        """Return the engine's part of `summary.json`."""
        return {"invariant": False, "pads": self._pads}


def generate(
    model: Any,
    prompts: Seq[Seq[int]],
    pad: int,
    most: int,
    sample: Callable[[Tensor], Tensor],
    over: Callable[[], bool],
) -> int:
    """Have the model read the prompts, padded on the left, and continue them by what `sample` makes of logits
    [rows, vocabulary], until it is `over` or has made `most` tokens. Returns the bytes of its cache."""
    width, device, inner = max(map(len, prompts)), model.device, unwrapped(model)
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)

    def only_sampled(ids: Tensor, logits: Tensor) -> Tensor:
        """Return logits of which the greatest is the token that was sampled."""
        return torch.zeros_like(logits).scatter_(1, sample(logits)[:, None], 1.0)

    def stops(ids: Tensor, logits: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(ids),), over(), device=device)

    # The model's own config may change logits (penalties, forbidden tokens, truncation); a thread may be saving it.
    inner = copy.copy(inner)
    inner.generation_config = GenerationConfig()
    made = inner.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=most,
        do_sample=False,
        pad_token_id=pad,
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([only_sampled]),
        stopping_criteria=StoppingCriteriaList([stops]),
    )
    # transformers calls it `cache` since 5.24
    return _bytes_of(made["cache" if "cache" in made else "past_key_values"], set())


def _bytes_of(cache: Any, seen: set[int]) -> int:
    """Sum the bytes of all tensors in a cache, each once: every family keeps something else."""
    if id(cache) in seen or isinstance(cache, type):
        return 0
    seen.add(id(cache))
    if isinstance(cache, Tensor):
        return cache.nbytes
    parts = cache.values() if isinstance(cache, dict) else cache if isinstance(cache, list | tuple) else ()
    inside = vars(cache).values() if hasattr(cache, "__dict__") else ()
    return sum(_bytes_of(part, seen) for part in (*parts, *inside))


@torch.no_grad()
def may_be_padded(model: Any, pad: int) -> bool:
    """Try a model of an unknown family on a few tokens, since no list of families is ever complete: True if prompts may
    be padded on the left. UserError for a model whose rollouts or updates would be those of another one."""
    inner = unwrapped(model)
    name, rounding = type(inner).__name__, _ROUNDING[inner.dtype]
    tokens = [(pad + 1 + i) % model.config.get_text_config().vocab_size for i in range(_LONG + _MADE)]
    ids, seen = torch.tensor([tokens], device=model.device), list[Tensor]()

    def given(logits: Tensor) -> Tensor:
        seen.append(logits.clone())
        return ids[0, _LONG + len(seen) - 1].expand(len(logits))

    def same(found: Tensor, expected: Tensor) -> bool:
        return bool((found - expected).abs().max() <= rounding * (expected.max() - expected.min()))

    with explained(f"engine=generate cannot run {name}", "; choose another model"):  # code that may be anybody's
        parts = (ids, ids[:, :_SHORT], ids[:, _LONG - _SHORT :])
        whole, early, of_short = (inner(input_ids=some, use_cache=False).logits[0].float() for some in parts)
        ours = head(model)(backbone(model)(input_ids=ids, use_cache=False).last_hidden_state[0])
        prompts = [tokens[:_LONG], tokens[_LONG - _SHORT : _LONG]]
        generate(model, prompts, pad, _MADE, given, lambda: len(seen) == _MADE)
    made = torch.stack(seen)
    faults = {
        "is not a causal model: its logits depend on later tokens": same(early, whole[:_SHORT]),
        "computes more than its backbone and head, so updates would be of another model": same(ours.float(), whole),
        "gives other logits with its cache, so rollouts would be of another distribution": same(
            made[:, 0], whole[_LONG - 1 : -1]
        ),
    }
    for fault, is_absent in faults.items():
        if not is_absent:
            raise UserError(f"{name} {fault}; choose a model of another family")
    return same(made[:, 1], of_short[_SHORT - 1 : -1])
