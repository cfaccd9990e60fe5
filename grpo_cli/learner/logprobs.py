"""Log-probabilities of given tokens under a model, in chunks, so that the [B, T, V] logits never exist.

Only the positions that predict a response token reach the head, `chunk` of them at a time; in the backward pass each
chunk's logits are made again, and become their own gradient in place. Peak memory is `chunk * V` numbers of the head's
precision in place of several times `B * T * V`, forward and backward, and a few rows in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_cli.model.anatomy import head
from grpo_cli.model.lean import last_states

_AT_ONCE = 1 << 23  # logits that are in float32 at one time


def token_logprobs(
    model: Any,
    input_ids: Int[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    temperature: float,
    chunk: int,
) -> Float[Tensor, "B T"]:
    """log p(token t | tokens before t) at the sampling temperature, float32; zero outside `response_mask`.

    Rows are right-padded, so the causal mask alone hides the padding and none other is built.
    """
    rows, columns = response_mask.nonzero(as_tuple=True)
    chosen = logprobs_at(model, input_ids, rows, columns, temperature, chunk)
    return torch.zeros(input_ids.shape, device=input_ids.device).index_put((rows, columns), chosen)


def logprobs_at(
    model: Any,
    input_ids: Int[Tensor, "B T"],
    rows: Int[Tensor, "N"],
    columns: Int[Tensor, "N"],
    temperature: float,
    chunk: int,
) -> Float[Tensor, "N"]:
    """The same for the tokens at these places only, none of them in the first column."""
    hidden = last_states(model, input_ids=input_ids)
    return chosen_logprobs(model, hidden[rows, columns - 1], input_ids[rows, columns], temperature, chunk)


def chosen_logprobs(
    model: Any, states: Float[Tensor, "N H"], labels: Int[Tensor, "N"], temperature: float, chunk: int
) -> Float[Tensor, "N"]:
    """log p(label) under the head, given the state that predicts it; `chunk` of them at a time."""
    to_logits = head(model)
    parts = []
    for some_states, ids in zip(states.split(chunk), labels.split(chunk), strict=True):
        if torch.is_grad_enabled():
            part = checkpoint(
                _chosen, to_logits, some_states, ids, temperature, use_reentrant=False, preserve_rng_state=False
            )
        else:
            part = _chosen(to_logits, some_states, ids, temperature)
        parts.append(part)
    return torch.cat(parts) if parts else states.new_zeros(0)


def _chosen(to_logits: Any, states: Float[Tensor, "N H"], ids: Int[Tensor, "N"], temperature: float) -> Tensor:
    chosen: Tensor = _Chosen.apply(to_logits(states), ids, temperature)
    return chosen


class _Chosen(torch.autograd.Function):
    """log softmax(logits / temperature)[id] of each row, in float32. The backward pass writes over the logits, so
    nothing else may hold them."""

    @staticmethod
    def forward(ctx: Any, logits: Float[Tensor, "N V"], ids: Int[Tensor, "N"], temperature: float) -> Tensor:
        ctx.save_for_backward(logits, ids)
        ctx.temperature = temperature
        chosen = logits.new_empty(ids.shape, dtype=torch.float32)
        for some, which, out in _few_rows(logits, ids, chosen):
            out.copy_(_log_softmax(some, temperature).gather(1, which[:, None])[:, 0])
        return chosen

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, "N"]) -> tuple[Tensor, None, None]:
        logits, ids = ctx.saved_tensors
        for some, which, factor in _few_rows(logits, ids, gradient / ctx.temperature):
            slope = _log_softmax(some, ctx.temperature).exp_().mul_(-factor[:, None])
            some.copy_(slope.scatter_add_(1, which[:, None], factor[:, None]))
        return logits, None, None


def _few_rows(logits: Float[Tensor, "N V"], *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, _AT_ONCE // logits.shape[1])
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)


def _log_softmax(logits: Float[Tensor, "N V"], temperature: float) -> Float[Tensor, "N V"]:
    logits = logits.float()
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
