"""Gradient checkpointing: of each layer only its input is kept, and the backward pass computes the layer again.

That input may lie elsewhere until then: in the CPU's memory a long sequence's inputs take none of a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import save_on_cpu

from grpo_cli.model.anatomy import backbone

Hooks = Callable[[], AbstractContextManager[Any]]  # what saved tensors go through, as `saved_tensors_hooks`


def recompute_layers(model: Any, offload: bool) -> None:
    """In train mode only, which the learner turns on for its updates. `offload` moves the inputs to pinned
    memory and back beside the computation: layers x tokens x hidden numbers, and no number is another for it."""
    # the second name is what releases of transformers without the first call it
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    if offload:
        keep_inputs(model, partial(save_on_cpu, pin_memory=True))


def keep_inputs(model: Any, hooks: Hooks) -> None:
    """Have what recomputed layers keep go through `hooks`."""
    for layer in backbone(model).layers:
        layer._gradient_checkpointing_func = partial(_checkpointed, layer._gradient_checkpointing_func, hooks)


def _checkpointed(checkpoint: Callable[..., Tensor], hooks: Hooks, layer: Callable[..., Tensor], *args: Any) -> Tensor:
    with hooks():  # of the layer's own tensors none comes here: the checkpoint's hooks are inside these, and drop them
        return checkpoint(layer, *args)
