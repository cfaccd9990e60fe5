"""Log-probabilities of given tokens under a model, in chunks, so that the [B, T, V] logits never exist.

The backward pass makes each softmax anyway, and measures its entropy (`Entropy`) on the way.

Only the positions that predict a response token reach the head, `chunk` of them at a time; in the backward pass each
chunk's logits are recomputed, and become their own gradient in place. Peak memory is `chunk * V` numbers of the head's
precision in place of several times `B * T * V`, forward and backward, and a few rows in float32 (compiled: none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_cli.model.anatomy import head, place_of
from grpo_cli.model.checkpointing import last_states
from grpo_cli.model.compiling import Compiler
from grpo_cli.model.transfer import send

_AT_ONCE = {"cpu": 1 << 21, "cuda": 1 << 26}  # logits in float32 at one time; a GPU works best with few large calls


@dataclass(frozen=True)
class ByRow:
    """What is computed from the logits of each row: log p of its token; and, given that and the row's factor, the
    gradient of factor * temperature * log p, which overwrites the logits, and the entropy of p in nats, into the last
    argument."""

    # Not in the repr: addresses, which differ between processes.
    chosen: Callable[[Tensor, Tensor, float], Tensor] = field(repr=False)
    slope: Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor], None] = field(repr=False)


def _chosen_in_parts(logits: Float[Tensor, "N V"], ids: Int[Tensor, "N"], temperature: float) -> Float[Tensor, "N"]:
    chosen = logits.new_empty(ids.shape, dtype=torch.float32)
    for some, which, out in few_rows(logits, ids, chosen):
        out.copy_(log_softmax(some, temperature).gather(1, which[:, None])[:, 0])
    return chosen


def _slope_in_parts(
    logits: Tensor, ids: Tensor, chosen: Tensor, factors: Tensor, temperature: float, entropy: Tensor
) -> None:
    for some, which, factor, out in few_rows(logits, ids, factors, entropy):
        logs = log_softmax(some, temperature)
        slope = logs.exp()
        torch.neg(sums_of(logs.mul_(slope)), out=out)
        slope.mul_(-factor[:, None])
        some.copy_(slope.scatter_add_(1, which[:, None], factor[:, None]))


def sums_of(terms: Float[Tensor, "N V"]) -> Float[Tensor, "N"]:
    """The sum of p log p over each row. A token of probability 0 adds 0, where 0 * -inf would be NaN."""
    return terms.nansum(dim=1)


PLAIN = ByRow(_chosen_in_parts, _slope_in_parts)


def compiled_by_row(warn: Callable[[str], None]) -> ByRow:
    """The same to float32's rounding in one or two passes over the logits, where that can be compiled. The first number
    of rows, most often the full chunk, is compiled for by itself, then all others at once, and a single row."""
    compiler = Compiler("log-probabilities in updates", "train.compile", warn)
    chosen = compiler.compiled(_chosen_at_once, None, PLAIN.chosen)
    written = compiler.compiled(_slope_at_once, None, PLAIN.slope)  # which asks for nothing in the place of `sums`

    def slope(
        logits: Tensor, ids: Tensor, chosen: Tensor, factors: Tensor, temperature: float, entropy: Tensor
    ) -> None:
        # Read out here: a pass that also looked at other places of the logits could not write over them.
        sums = logits.gather(1, ids[:, None])[:, 0].float() / temperature - chosen
        written(logits, ids, sums, factors, temperature, entropy)

    return ByRow(chosen, slope)


def _chosen_at_once(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits.float() / temperature, dim=-1).gather(1, ids[:, None])[:, 0]


def _slope_at_once(
    logits: Tensor, ids: Tensor, sums: Tensor, factors: Tensor, temperature: float, entropy: Tensor
) -> None:
    """`sums` are those of which the softmax is made, as logarithms."""
    own = torch.arange(logits.shape[1], device=logits.device) == ids[:, None]
    logs = logits.float() / temperature - sums[:, None]
    entropy.copy_(-sums_of(logs * logs.exp()))
    logits.copy_((own.float() - logs.exp()) * factors[:, None])


class Entropy:
    """Mean entropy in nats of the distributions that some tokens of a part were predicted from.

    A backward pass through the part's log-probabilities measures it, at the temperature that those are at and without
    a gradient of its own; before that there is none. `counted` (B T) says which tokens count, and `total` how many
    there are in the whole update: the shares of its parts add up to the mean.
    """

    def __init__(self, counted: Bool[Tensor, "B T"], total: int) -> None:
        self._counted, self._total = counted, total
        self._found: list[tuple[Tensor, Tensor]] = []

    def room(self, rows: Int[Tensor, "N"], columns: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
        """Where the backward pass writes the entropies of the tokens at these places."""
        counted = self._counted[rows, columns]
        values = torch.zeros(counted.shape, device=counted.device)
        self._found.append((counted, values))
        return values

    def share(self) -> Float[Tensor, ""]:
        sums = [values.masked_fill(~counted, 0.0).sum() for counted, values in self._found]
        return torch.stack(sums).sum() / max(self._total, 1)


def token_logprobs(
    model: Any,
    input_ids: Int[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    temperature: float,
    chunk: int,
    by_row: ByRow = PLAIN,
    entropy: Entropy | None = None,
    **inputs: Any,
) -> Float[Tensor, "B T"]:
    """log p(token t | tokens before t) at the sampling temperature, float32; zero outside `response_mask`. `inputs`
    are for the backbone, beside the ids.

    The inputs are on the host, where the number of tokens is then known; the result is on the model's device. Rows are
    right-padded, so the causal mask alone hides the padding and none other is built."""
    device, places = place_of(model), response_mask.nonzero(as_tuple=True)
    ids, rows, columns = send(device, *(x.numpy() for x in (input_ids, *places)))
    chosen = logprobs_at(model, ids, rows, columns, temperature, chunk, by_row, entropy, **inputs)
    return torch.zeros(input_ids.shape, device=device).index_put((rows, columns), chosen)


def logprobs_at(
    model: Any,
    input_ids: Int[Tensor, "B T"],
    rows: Int[Tensor, "N"],
    columns: Int[Tensor, "N"],
    temperature: float,
    chunk: int,
    by_row: ByRow = PLAIN,
    entropy: Entropy | None = None,
    **inputs: Any,
) -> Float[Tensor, "N"]:
    """The same for the tokens at these places only, none of them in the first column."""
    hidden = last_states(model, input_ids=input_ids, **inputs)
    states, labels = hidden[rows, columns - 1], input_ids[rows, columns]
    room = None if entropy is None else entropy.room(rows, columns)
    return chosen_logprobs(model, states, labels, temperature, chunk, by_row, room)


def chosen_logprobs(
    model: Any,
    states: Float[Tensor, "N H"],
    labels: Int[Tensor, "N"],
    temperature: float,
    chunk: int,
    by_row: ByRow = PLAIN,
    entropy: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "N"]:
    """log p(label) under the head, given the state that predicts it; `chunk` of them at a time. The
    backward pass writes each p's entropy to `entropy`."""
    to_logits = head(model)
    room = torch.empty(labels.shape, device=labels.device) if entropy is None else entropy
    parts: list[Tensor] = []
    for some_states, ids, out in zip(*(given.split(chunk) for given in (states, labels, room)), strict=True):
        given = to_logits, some_states, ids, temperature, by_row
        if torch.is_grad_enabled():
            # By keyword: checkpoint saves positional tensors, and refuses to go back once one was written to.
            part = checkpoint(_chosen, *given, room=out, use_reentrant=False, preserve_rng_state=False)
        else:
            part = _chosen(*given, room=out)
        parts.append(part)
    return torch.cat(parts) if parts else states.new_zeros(0)


def _chosen(
    to_logits: Any,
    states: Float[Tensor, "N H"],
    ids: Int[Tensor, "N"],
    temperature: float,
    by_row: ByRow,
    room: Tensor,
) -> Tensor:
    chosen: Tensor = _Chosen.apply(to_logits(states), ids, temperature, by_row, room)
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
        ctx.save_for_backward(logits, ids, chosen)
        ctx.temperature, ctx.by_row, ctx.room = temperature, by_row, room
        return chosen

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, "N"]) -> tuple[Tensor, None, None, None, None]:
        logits, ids, chosen = ctx.saved_tensors
        ctx.by_row.slope(logits.detach(), ids, chosen, gradient / ctx.temperature, ctx.temperature, ctx.room)
        return logits, None, None, None, None


def few_rows(logits: Float[Tensor, "N V"], *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, _AT_ONCE[logits.device.type] // logits.shape[1])
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)


def log_softmax(logits: Float[Tensor, "N V"], temperature: float) -> Float[Tensor, "N V"]:
    logits = logits.float()
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
