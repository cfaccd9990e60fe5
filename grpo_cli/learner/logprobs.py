"""Log-probabilities of given tokens under a model, in chunks, so that the [B, T, V] logits never exist.

Only the positions that predict a response token reach the head, `chunk` of them at a time; in the backward pass each
chunk's logits are made again. Peak memory is `chunk * V` floats in place of `B * T * V`, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_cli.model.anatomy import backbone, head


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
    hidden = backbone(model)(input_ids=input_ids, use_cache=False).last_hidden_state
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
    logits = to_logits(states).float()
    if temperature != 1.0:
        logits = logits / temperature
    return -F.cross_entropy(logits, ids, reduction="none")
