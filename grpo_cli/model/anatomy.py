"""The two halves of a Hugging Face causal language model, whatever wraps it: the backbone and the head.

Of a Llama-shaped model the head is a layer. Others scale or cap its logits in their own way, so there it is the model
itself, which computes logits from states that its backbone has returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grpo_cli.model.checks import ARCHITECTURES, window_of

PACKING = "grpo_packed"  # the name that transformers has for the attention of `model.packed`
_NO_MASK = torch.empty(0, 0, 0, 0)


def unwrapped(model: Any) -> Any:
    """Return the causal language model inside a PEFT wrapper (PEFT replaces layers in place); else the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_llama_shaped(model: Any) -> bool:
    """True if it is of the families whose layers are driven, packed and taken apart here. Of any other nothing
    is known but its two halves."""
    return type(unwrapped(model)).__name__ in ARCHITECTURES.values()


def can_pack(model: Any) -> bool:
    """True if the model's rows may be packed: layers of a known shape, each of which attends to all tokens before."""
    return is_llama_shaped(model) and window_of(unwrapped(model).config) is None


def without_mask(model: Any) -> dict[str, Tensor]:
    """Return the input that keeps transformers from building a mask where causal attention needs none: packed rows, and
    rows padded on the right. Before it builds one it waits for a GPU to compare positions."""
    packing = backbone(model).config._attn_implementation == PACKING and can_pack(model)
    return {"attention_mask": _NO_MASK} if packing else {}


def backbone(model: Any) -> Any:
    """Return the half from token ids to last hidden states."""
    inner = unwrapped(model)
    return inner.model if is_llama_shaped(model) else inner.base_model


def head(model: Any) -> Any:
    """Return the half from hidden states to logits."""
    inner = unwrapped(model)
    return inner.lm_head if is_llama_shaped(model) else partial(_after_backbone, inner)


def _after_backbone(model: Any, states: Tensor) -> Tensor:
    """Compute the [N, V] logits of [N, H] states by all that a model does after its backbone."""
    nothing = torch.zeros(1, 0, dtype=torch.long, device=states.device)  # there are no tokens to read
    without = copy(model)  # a thread may be saving the model itself
    without._modules = {**model._modules, model.base_model_prefix: _Given(states[None])}
    logits: Tensor = without(input_ids=nothing, use_cache=False).logits
    return logits[0]


@dataclass(frozen=True)
class _Given:
    """A stand-in for a backbone, or for a part of it that the model calls on its own."""

    states: Tensor

    def __call__(self, *args: Any, **kwargs: Any) -> _States:
        return _States((self.states,))

    def __getattr__(self, name: str) -> _Given:
        return self


class _States(tuple[Tensor]):
    """The output of a backbone: its states, by name and as the first of what it gives, and nothing else."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def has_dropout(model: Any) -> bool:
    """True if it has active dropout, so that train mode differs from eval mode."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())


def merged_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight, without gradient and with adapters merged, by its name in the model's saved folder.

    Weights without adapters are the model's own tensors, not copies; a merged one exists only while it is the current
    one. Tied weights are yielded under each of their names.
    """
    inner = unwrapped(model)
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        path, adapted, rest = name.partition(".base_layer")
        if adapted and rest == ".weight":
            layer = deepcopy(inner.get_submodule(path))
            layer.merge()
            yield path + rest, layer.get_base_layer().weight.detach()
        elif ".lora_" not in name and ".original_module." not in name:  # PEFT's names of a layer trained whole
            yield (path + rest).replace(".modules_to_save.default", ""), parameter.detach()
