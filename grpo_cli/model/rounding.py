"""Weights rounded to few bits, in blocks with a scale each (`engine.quantize`, `model.fake_quantize`).

    s = max |w| of a block of 128 x 128 / 127 (int8), / 7 (int4), / 448 (fp8: 4 bits of exponent, 3 of mantissa)
    w' = s round(w / s),  or s times the nearest such float

Rollouts from such weights, and a training forward that rounds alike so that both passes agree, are Jet-RL's (arXiv
2601.14243). Here products multiply the rounded numbers in the precision of the computation: what rounding does to a run
is exact, what it saves in time and memory is not had. Ours: only weights are rounded (no activations), and of these the
layers' matrices (embedding, head, norms, biases and adapters are not), int8 and int4.

Measured: scripts/reproduce/frontier_d.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from grpo_cli.model.anatomy import is_llama_shaped, unwrapped
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import OneOf

Kind = Annotated[str, OneOf(("none", "int8", "fp8", "int4"))]
BLOCK = 128
_LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}


@torch.no_grad()
def rounded(weight: Float[Tensor, "O I"], kind: Kind) -> Float[Tensor, "O I"]:
    """The weight as these bits hold it, in its own precision; computed in float32."""
    if kind == "none":
        return weight
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [blocks, 128, blocks, 128]
    scale = blocks.abs().amax((1, 3), keepdim=True) / _LARGEST[kind]
    units = blocks / torch.where(scale > 0, scale, 1.0)
    near = units.to(torch.float8_e4m3fn).float() if kind == "fp8" else units.round()
    return (near * scale).flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous().to(weight.dtype)


def layers_to_round(model: Any) -> list[nn.Linear]:
    """The linear layers of the model's blocks, without adapters. UserError for a model whose layers are not known."""
    inner = unwrapped(model)
    if not is_llama_shaped(model):
        raise UserError(
            f"model.fake_quantize rounds the layers of Llama-shaped models, and {type(inner).__name__} has others: "
            "leave it out"
        )
    named = inner.model.layers.named_modules()
    return [one for name, one in named if type(one) is nn.Linear and "lora_" not in name]


@contextmanager
def rounded_in_place(model: Any, kind: Kind) -> Iterator[None]:
    """Within it the layers have rounded weights: gradients are those of the rounded ones, and after it move the whole
    (straight through). Their own stay where they are in memory."""
    weights = [] if kind == "none" else [layer.weight for layer in layers_to_round(model)]
    own = [weight.data for weight in weights]
    try:
        for weight in weights:
            weight.data = rounded(weight.data, kind)
        yield
    finally:
        for weight, data in zip(weights, own, strict=True):
            weight.data = data
