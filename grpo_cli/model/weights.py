"""A model's weights under the names in its saved folder, for engines that hold a copy of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_cli.model.anatomy import unwrapped
from grpo_cli.support.errors import UserError


def merged_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight with its name, without gradient, adapters merged.

    Weights without adapters are the model's own tensors, not copies; a merged one exists only while it is the current
    one. Tied weights are yielded under each of their names. UserError for an adapted layer whose weights are packed
    (quantised): they cannot be merged.
    """
    inner = unwrapped(model)
    adapted = {path for path, module in inner.named_modules() if hasattr(module, "get_delta_weight")}
    for path, module in inner.named_modules():
        if path in adapted:
            for name, parameter in module.base_layer.named_parameters(recurse=False):
                weight = parameter.detach()
                yield f"{path}.{name}", _with_adapters(weight, module, path) if name == "weight" else weight
        elif not any(path.startswith(f"{layer}.") for layer in adapted):
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}" if path else name, parameter.detach()


@torch.no_grad()
def _with_adapters(weight: Tensor, layer: Any, path: str) -> Tensor:
    if not weight.is_floating_point():
        raise UserError(
            f"the weights of {path} are quantised, and its adapters cannot be merged into them for engine=vllm: load "
            "the model unquantised, or use engine=torch"
        )
    total = weight
    for adapter in layer.active_adapters:
        delta = layer.get_delta_weight(adapter)
        total = total.to(torch.promote_types(total.dtype, delta.dtype)) + delta
    return total.to(weight.dtype)
