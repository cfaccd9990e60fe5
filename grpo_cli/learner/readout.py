"""One pass of the policy that reads more in rollouts than log-probabilities: entropies, likely tokens, hidden states.

What is read is reduced where it comes up: logits as they pass in chunks, hidden states in a hook on their layer. So
neither `[B, T, V]` nor `[B, T, H]` of a whole batch exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_cli.interfaces import Rules
from grpo_cli.learner.batch import rows_of
from grpo_cli.learner.forward import Padded
from grpo_cli.learner.logprobs import KeptTokens, few_rows, kept_tokens, log_softmax, sums_of, truncate
from grpo_cli.model.anatomy import head, layer_of, place_of
from grpo_cli.model.mlp_recompute import last_states
from grpo_cli.model.transfer import fetched, send
from grpo_cli.support.errors import UserError
from grpo_cli.types import Batch, Readout

READS = frozenset({"entropies", "top", "features"})
POOLED = 10  # tokens at the end of a prompt and of a response that features are the mean of


def reads_of(rule: Any) -> frozenset[str]:
    """What a rule says that it reads (`facts`: reads). UserError for what a readout does not have."""
    said = frozenset(getattr(getattr(rule, "func", rule), "reads", ()))
    if unknown := said - READS:
        raise UserError(
            f"reads: {', '.join(sorted(unknown))} is not in a readout, which has {', '.join(sorted(READS))}"
        )
    return said


def layer_read(rules: Rules, model: Any = None) -> int | None:
    """The layer whose features the rules read; None: the default. UserError if they read two, or one that `model` does
    not have."""
    reading = [rule for rule in (rules.advantage, rules.credit) if "features" in reads_of(rule)]
    layers = {_layer(rule) for rule in reading}
    if len(layers) > 1:
        raise UserError("advantage.layer and credit.layer are two layers, and one pass reads one: give both the same")
    for rule in (*reading, *([rules.collector] if "features" in reads_of(rules.collector) else ())):
        if model is not None:
            layer_of(model, _layer(rule))
    return next(iter(layers), None)


def _layer(rule: Any) -> int | None:
    layer: int | None = getattr(rule, "keywords", vars(rule)).get("layer")
    return layer


@torch.no_grad()
def read(
    model: Any, forward: Padded, batch: Batch, reads: Set[str], layer: int | None = None, last: int = POOLED
) -> Readout:
    """The policy's log-probabilities of the batch's response tokens, and what else `reads` names. UserError if hidden
    states are not finite, or if there is no such layer."""
    forward.prepare(model)
    parts = forward.micro_batches(batch)
    found = [_of_part(model, forward, rows_of(batch, rows), reads, layer, last) for rows in parts]
    names, flat = list(found[0]), fetched([value for one in found for value in one.values()])
    whole = {}
    for number, name in enumerate(names):
        values = flat[number :: len(names)]
        tail = values[0].shape[1:] if name == "features" else (batch.input_ids.shape[1], *values[0].shape[2:])
        whole[name] = torch.zeros((len(batch), *tail), dtype=values[0].dtype)
        for rows, some in zip(parts, values, strict=True):
            whole[name][rows, : some.shape[1]] = some
    if "features" in whole and not whole["features"].isfinite().all():
        raise UserError(
            "the hidden states that are read are not finite: the model overflows in model.dtype or model.autocast; use "
            "float32, or read another layer"
        )
    return Readout(**whole)


def _of_part(
    model: Any, forward: Padded, part: Batch, reads: Set[str], layer: int | None, last: int
) -> Mapping[str, Tensor]:
    device, places = place_of(model), part.response_mask.nonzero(as_tuple=True)
    ids, rows, columns = send(device, *(x.numpy() for x in (part.input_ids, *places)))
    found: dict[str, Tensor] = {}
    with _pooled(model, layer, _ends(part, last).to(device), found) if "features" in reads else nullcontext():
        states = last_states(model, input_ids=ids, **forward.view(model, part))
    labels, kept = ids[rows, columns], kept_tokens(part, *places)
    said = _of_logits(model, states[rows, columns - 1], labels, forward, kept, reads)
    for name, value in said.items():
        empty = torch.zeros((*ids.shape, *value.shape[1:]), dtype=value.dtype, device=device)
        found[name] = empty.index_put((rows, columns), value)
    return found


def _of_logits(
    model: Any,
    states: Float[Tensor, "N H"],
    labels: Int[Tensor, "N"],
    forward: Padded,
    kept: KeptTokens | None,
    reads: Set[str],
) -> Mapping[str, Tensor]:
    """Of each state's distribution what is read; a chunk of logits exists at a time."""
    to_logits, device = head(model), states.device
    found = {"logprobs": torch.zeros(labels.shape, device=device)}
    if "entropies" in reads:
        found["entropies"] = torch.zeros(labels.shape, device=device)
    if "top" in reads:
        found["top_probs"] = torch.zeros((len(labels), 2), device=device)
        found["top_ids"] = torch.zeros((len(labels), 2), dtype=torch.long, device=device)
    for start in range(0, len(labels), forward.chunk):
        some = slice(start, start + forward.chunk)
        logits = to_logits(states[some])
        truncate(logits, None if kept is None else kept.of(start, len(logits), device))
        outs = [value[some] for value in found.values()]
        for few, ids, *out in few_rows(logits, labels[some], *outs):
            named = dict(zip(found, out, strict=True))
            logs = log_softmax(few, forward.temperature)
            named["logprobs"].copy_(logs.gather(1, ids[:, None])[:, 0])
            if "top" in reads:
                logs_of_top, named["top_ids"][:] = logs.topk(2, dim=1)
                named["top_probs"].copy_(logs_of_top.exp())
            if "entropies" in reads:
                named["entropies"].copy_(-sums_of(logs * logs.exp()))
    return found


@contextmanager
def _pooled(model: Any, layer: int | None, ends: Bool[Tensor, "2 B T"], found: dict[str, Tensor]) -> Iterator[None]:
    """Within it, what the layer puts out is pooled into `found` as it comes up, and not kept."""

    def pool(module: Any, inputs: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        means = [_mean(states, one) for one in ends]
        found["features"] = torch.cat(means, dim=1)

    hook = layer_of(model, layer).register_forward_hook(pool)
    try:
        yield
    finally:
        hook.remove()


def _mean(states: Float[Tensor, "B T H"], over: Bool[Tensor, "B T"]) -> Float[Tensor, "B H"]:
    """In float32; 0 over no tokens. What lies outside, even NaN, does not count."""
    kept = states.float().masked_fill(~over[:, :, None], 0.0)
    return kept.sum(dim=1) / over.sum(dim=1).clamp(min=1)[:, None]


def _ends(part: Batch, last: int) -> Bool[Tensor, "2 B T"]:
    """The last tokens of each prompt, and of each response."""
    response, places = part.response_mask, torch.arange(part.input_ids.shape[1])
    starts = torch.where(response.any(dim=1), response.int().argmax(dim=1), part.lengths)[:, None]
    left = response.flip(1).cumsum(dim=1).flip(1)  # of the response, from this token on
    return torch.stack([(places < starts) & (places >= starts - last), response & (left <= last)])
