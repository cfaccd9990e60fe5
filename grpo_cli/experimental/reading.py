"""Reads the policy in rollouts, by a forward pass of its own: hidden states, entropies, likely tokens.

Nothing of a whole batch is kept: hidden states are averaged in a hook on their layer, logits come up in chunks. The
model computes without dropout, in its own precision in training, and under `model.autocast` in searches of `grpo eval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from grpo_cli.interfaces import Runtime
from grpo_cli.learner.batch import collate, rows_of
from grpo_cli.learner.forward import padded, padded_parts
from grpo_cli.model.anatomy import backbone, head, unwrapped
from grpo_cli.model.checkpointing import last_states
from grpo_cli.support.errors import UserError
from grpo_cli.types import Batch, Group, Rollout

TOKENS_AT_A_TIME, LOGITS_AT_A_TIME = 16384, 512  # padding counts
POOLED = 10  # tokens at the end of a prompt and of a response that features are the mean of


@dataclass(frozen=True)
class PolicyReading:
    """The results of a pass over rollouts, in their order.

    `features` are the means of a layer's states over the last tokens of the prompt, then of the model's own.
    Of each token of its own: the entropy in nats of the distribution that it was sampled from, and the two likeliest
    tokens there, the first first. Empty unless they were wanted.
    """

    features: Float[np.ndarray, "N F"]
    entropies: tuple[Float[np.ndarray, "_"], ...] = ()
    top_ids: tuple[Int[np.ndarray, "_ 2"], ...] = ()
    top_probs: tuple[Float[np.ndarray, "_ 2"], ...] = ()


def layer_of(model: Any, number: int | None) -> Any:
    """Return layer `number` of the backbone, from 1 (None: that at two thirds, rounded up). UserError without one."""
    body = backbone(model)
    count = body.config.num_hidden_layers
    layers = next((m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)
    if layers is None:
        raise UserError(f"no hidden states can be read in {type(unwrapped(model)).__name__}: its layers are not found")
    place = -(-2 * count // 3) if number is None else number
    if not 1 <= place <= count:
        raise UserError(f"layer={number} cannot be read: the model's are 1 to {count}; null is the one at two thirds")
    return layers[place - 1]


@torch.no_grad()
def read(
    runtime: Runtime, rollouts: Sequence[Rollout], *, layer: int | None = None, last: int = POOLED, tokens: bool = False
) -> PolicyReading:
    """Return what a pass over rollouts gives, `layer` from 1 (None: that at two thirds). UserError for states that are
    not finite, or without such a layer."""
    batch = collate([Group(one.request.prompt, (one,)) for one in rollouts])
    parts = padded_parts((batch.prompt_lengths + batch.lengths).tolist(), TOKENS_AT_A_TIME)
    temperature = rollouts[0].request.sampling.temperature or 1.0
    features: dict[int, np.ndarray] = {}
    per_token: dict[int, tuple[np.ndarray, ...]] = {}
    for rows in parts:
        part = rows_of(batch, torch.tensor(rows))
        states, pooled = _pass(runtime.model, part, layer, last)
        features |= dict(zip(rows, pooled.double().cpu().numpy(), strict=True))
        if tokens:
            per_token |= dict(zip(rows, _of_tokens(runtime.model, part, states, temperature), strict=True))
    found = np.stack([features[row] for row in range(len(batch))])
    if not np.isfinite(found).all():
        raise UserError("hidden states that are read are not finite: use model.dtype=float32, or read another layer")
    return PolicyReading(found, *zip(*(per_token[row] for row in range(len(per_token))), strict=True))


def _pass(model: Any, part: Batch, layer: int | None, last: int) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B F"]]:
    """Return the last hidden states, and the features: the layer's states are averaged as they come up."""
    device, ids, found = model.device, padded(part), list[Tensor]()
    ends = _ends(part, last, ids.shape[1]).to(device)

    def pool(module: Any, inputs: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        found.append(torch.cat([_mean(states, one) for one in ends], dim=1))

    with layer_of(model, layer).register_forward_hook(pool):
        states = last_states(model, ids.to(device))
    return states, found[0]


def _mean(states: Float[Tensor, "B T H"], over: Bool[Tensor, "B T"]) -> Float[Tensor, "B H"]:
    """Return the mean in float32, 0 over no tokens; those outside, even NaN, do not count."""
    kept = states.float().masked_fill(~over[:, :, None], 0.0)
    return kept.sum(dim=1) / over.sum(dim=1).clamp(min=1)[:, None]


def _ends(part: Batch, last: int, width: int) -> Bool[Tensor, "2 B T"]:
    """Return the last tokens of each prompt, and of each response."""
    starts, places = part.prompt_lengths[:, None], torch.arange(width)
    of_response = torch.zeros(len(part), width, dtype=torch.bool)
    of_response[_rows(part), part.positions] = part.response_mask & (part.left(part.response_mask) <= last)
    return torch.stack([(places < starts) & (places >= starts - last), of_response])


def _rows(part: Batch) -> Int[Tensor, "N"]:
    return part.per_token(torch.arange(len(part)))


def _of_tokens(
    model: Any, part: Batch, states: Float[Tensor, "B T H"], temperature: float
) -> list[tuple[np.ndarray, ...]]:
    """Return of each row entropies, likeliest ids and their probabilities; a chunk of logits exists at a time."""
    places = torch.stack([_rows(part), part.positions - 1])[:, part.response_mask].to(states.device)
    chosen, to_logits = states[places[0], places[1]], head(model)
    found: list[tuple[np.ndarray, ...]] = []
    for some in chosen.split(LOGITS_AT_A_TIME):
        logs = torch.log_softmax(to_logits(some).float() / temperature, dim=1)
        probs, ids = logs.topk(2, dim=1)
        entropies = -(logs * logs.exp()).nansum(dim=1)  # a token of probability 0 adds 0
        found.append(tuple(x.cpu().numpy() for x in (entropies.double(), ids, probs.exp().double())))
    joined = [np.concatenate(values) for values in zip(*found, strict=True)]
    ends = np.cumsum(part.sums(part.response_mask).long().numpy())[:-1]
    return list(zip(*(np.split(value, ends) for value in joined), strict=True))
