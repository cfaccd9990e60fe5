"""Gradient checkpointing: only each layer's input is stored, and the backward pass recomputes the layer.

The input may be offloaded until then: in CPU memory, a long sequence's inputs take none of the GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import save_on_cpu

from grpo_cli.model.anatomy import backbone

Hooks = Callable[[], AbstractContextManager[Any]]  # a factory of `saved_tensors_hooks`


def recompute_layers(model: Any, offload: bool) -> None:
    """In train mode only, which the learner turns on for its updates. `offload` moves the inputs (layers x tokens x
    hidden numbers) to pinned memory and back during the computation, without changing a bit."""
    # the second is its name in older releases of transformers
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    if offload:
        keep_inputs(model, partial(save_on_cpu, pin_memory=True))


def keep_inputs(model: Any, hooks: Hooks) -> None:
    """Apply `hooks` to the inputs that recomputed layers save."""
    for layer in backbone(model).layers:
        layer._gradient_checkpointing_func = partial(_checkpointed, layer._gradient_checkpointing_func, hooks)


def _checkpointed(checkpoint: Callable[..., Tensor], hooks: Hooks, layer: Callable[..., Tensor], *args: Any) -> Tensor:
    with hooks():  # only sees the inputs: the checkpoint's hooks, inside these, drop the layer's own tensors
        return checkpoint(layer, *args)
