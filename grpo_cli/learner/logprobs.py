"""Log-probabilities of given tokens under a model, in chunks, so that the [B, T, V] logits never exist.

The backward pass makes each softmax anyway, and measures its entropy on the way.

Only the positions that predict a response token reach the head, `chunk` of them at a time; in the backward pass each
chunk's logits are recomputed, and become their own gradient in place. Peak memory is `chunk * V` numbers of the head's
precision in place of several times `B * T * V`, forward and backward, and a few rows in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_cli.model.anatomy import has_dropout, head

AT_ONCE = {"cpu": 1 << 21, "cuda": 1 << 26}  # logits in float32 at one time; a GPU works best with few large calls


@dataclass(frozen=True)
class ByRow:
    """Functions of the logits of some rows: log p of each row's token; and, given the row's factor, the gradient of
    factor * temperature * log p, which overwrites the logits, and the entropy of p in nats, into the last argument."""

    # Not in the repr: addresses, which differ between processes.
    chosen: Callable[[Tensor, Tensor, float], Tensor] = field(repr=False)
    slope: Callable[[Tensor, Tensor, Tensor, float, Tensor], None] = field(repr=False)


def _chosen_in_parts(logits: Float[Tensor, "N V"], ids: Int[Tensor, "N"], temperature: float) -> Float[Tensor, "N"]:
    chosen = logits.new_empty(ids.shape, dtype=torch.float32)
    for some, which, out in few_rows(logits, ids, chosen):
        out.copy_(log_softmax(some, temperature).gather(1, which[:, None])[:, 0])
    return chosen


def _slope_in_parts(logits: Tensor, ids: Tensor, factors: Tensor, temperature: float, entropy: Tensor) -> None:
    for some, which, factor, out in few_rows(logits, ids, factors, entropy):
        logs = log_softmax(some, temperature)
        slope = logs.exp()
        # A token of probability 0 adds 0, where 0 * -inf would be NaN.
        torch.neg(logs.mul_(slope).nansum(dim=1), out=out)
        slope.mul_(-factor[:, None])
        some.copy_(slope.scatter_add_(1, which[:, None], factor[:, None]))


PLAIN = ByRow(_chosen_in_parts, _slope_in_parts)


def chosen_logprobs(
    model: Any,
    states: Float[Tensor, "N H"],
    labels: Int[Tensor, "N"],
    temperature: float,
    chunk: int,
    by_row: ByRow = PLAIN,
    entropies: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "N"]:
    """Compute log p(label) under the head, given the state that predicts it; `chunk` of them at a time. The backward
    pass, or this one where there is no gradient, writes each p's entropy to `entropies`."""
    to_logits = head(model)
    random = isinstance(to_logits, nn.Module) and has_dropout(to_logits)  # by adapters
    room = torch.empty(labels.shape, device=labels.device) if entropies is None else entropies
    parts: list[Tensor] = []
    for some_states, ids, out in zip(*(given.split(chunk) for given in (states, labels, room)), strict=True):
        given = to_logits, some_states, ids, temperature, by_row
        if torch.is_grad_enabled():
            # By keyword: checkpoint saves positional tensors, and refuses to go back once one was written to.
            part = checkpoint(_chosen, *given, room=out, use_reentrant=False, preserve_rng_state=random)
        else:
            part = _chosen(*given, room=None if entropies is None else out)
        parts.append(part)
    return torch.cat(parts)


def _chosen(
    to_logits: Any,
    states: Float[Tensor, "N H"],
    ids: Int[Tensor, "N"],
    temperature: float,
    by_row: ByRow,
    room: Tensor | None,
) -> Tensor:
    logits = to_logits(states)
    if torch.is_grad_enabled():
        return _Chosen.apply(logits, ids, temperature, by_row, room)
    chosen = by_row.chosen(logits, ids, temperature)
    if room is not None:
        by_row.slope(logits, ids, torch.zeros_like(chosen), temperature, room)
    return chosen


class _Chosen(torch.autograd.Function):
    """log softmax(logits / temperature)[id] of each row, in float32. The backward pass writes over the logits, so
    nothing else may hold them, and the rows' entropies into `room`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Float[Tensor, "N V"],
        ids: Int[Tensor, "N"],
        temperature: float,
        by_row: ByRow,
        room: Float[Tensor, "N"],
    ) -> Tensor:
        chosen = by_row.chosen(logits.detach(), ids, temperature)
        ctx.save_for_backward(logits, ids)
        ctx.temperature, ctx.by_row, ctx.room = temperature, by_row, room
        return chosen

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, "N"]) -> tuple[Tensor, None, None, None, None]:
        logits, ids = ctx.saved_tensors
        ctx.by_row.slope(logits.detach(), ids, gradient / ctx.temperature, ctx.temperature, ctx.room)
        return logits, None, None, None, None


def few_rows(logits: Float[Tensor, "N V"], *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, AT_ONCE[logits.device.type] // logits.shape[1])
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)


def log_softmax(logits: Float[Tensor, "N V"], temperature: float) -> Float[Tensor, "N V"]:
    return torch.log_softmax(logits.float() if temperature == 1.0 else logits.float() / temperature, dim=-1)
