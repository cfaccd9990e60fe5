"""Gradient checkpointing: what of a layer is kept for the backward pass. The rest is recomputed, with the same bits.

`full` keeps a layer's input alone. `elementwise` also keeps what products and attention return, and recomputes norms,
activations, rotations and casts; on a CPU with memory to spare a small pass keeps everything, which takes less time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from grpo_cli.model.anatomy import backbone, without_mask
from grpo_cli.native.ops import tree_attention
from grpo_cli.support.memory import give_back_freed, little_bytes

Hooks = Callable[[], AbstractContextManager[Any]]  # a factory of `saved_tensors_hooks`
_AT_MOST_FREED = 1 << 27  # bytes kept or used before freed memory is returned to the system
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_ATTENTION = {
    tree_attention._opoverload,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def last_states(model: Any, input_ids: Tensor, **inputs: Any) -> Tensor:
    """Compute the backbone's last hidden states. Autocast's weight cache is off: each weight is used once here."""
    inputs |= without_mask(model)
    kind = input_ids.device.type
    precision = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    with torch.autocast(kind, *precision, cache_enabled=False):
        states: Tensor = backbone(model)(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
    return states


def recompute_layers(model: Any, what: str, hooks: Hooks = nullcontext) -> None:
    """Recompute in train mode, which the learner turns on for its updates. `hooks` apply to a layer's kept input."""
    body, elementwise = backbone(model), what == "elementwise"
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, body.config))
    # the second is its name in older releases of transformers
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False} | ({"context_fn": contexts} if elementwise else {}))
    if elementwise or hooks is not nullcontext:  # else the checkpoints of transformers do
        checkpoint = _Checkpoint(body.layers[0]._gradient_checkpointing_func, body.config, elementwise, hooks)
        for layer in body.layers:
            layer._gradient_checkpointing_func = checkpoint


def keep_little(model: Any, little: bool) -> None:
    """Make elementwise passes keep little, or everything, whatever their size: for plans, on fake tensors of a CPU."""
    checkpoint = getattr(backbone(model).layers[0], "_gradient_checkpointing_func", None)
    if isinstance(checkpoint, _Checkpoint):
        checkpoint.keeps_little = little


@dataclass
class _Checkpoint:
    """The checkpoint of every layer of a model: `run` is PyTorch's, and `hooks` see a layer's input alone.

    After an elementwise pass on a CPU freed memory goes back to the system now and then. Most of it would never be
    reused: glibc's aligned allocations ask for more than their size, so that none fits where one of the same size has
    been.
    """

    run: Callable[..., Tensor]
    config: Any
    elementwise: bool
    hooks: Hooks
    keeps_little: bool | None = None  # None: unless a pass is small
    freed: int = 0  # bytes, roughly, since memory last went back

    def __call__(self, layer: Callable[..., Tensor], hidden: Tensor, *args: Any) -> Tensor:
        stored, little = stored_bytes(self.config, hidden.numel() // self.config.hidden_size), self.keeps_little
        on_cpu = self.elementwise and hidden.device.type == "cpu"
        if on_cpu and (stored * self.config.num_hidden_layers <= little_bytes() if little is None else not little):
            return layer(hidden, *args)
        with self.hooks():  # the checkpoint's own hooks are inside these
            out = self.run(layer, hidden, *args)
        if on_cpu:
            self._note(stored)
            if out.requires_grad:
                out.register_hook(lambda _: self._note(stored))
        return out

    def _note(self, nbytes: int) -> None:
        self.freed += nbytes
        if self.freed > _AT_MOST_FREED:
            self.freed = 0
            give_back_freed()


def stored_bytes(config: Any, tokens: int) -> int:
    """Return roughly the bytes that a layer would store for its backward pass, counted for float32."""
    return 4 * tokens * (11 * config.hidden_size + 4 * config.intermediate_size)


def _policy(config: Any, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what attention and products return, but for the last product of a layer, whose result nothing needs, and
    those with adapters, which are as cheap as they are narrow."""
    kept = op in _ATTENTION
    if op in _PRODUCTS:
        depth, width = args[-1].shape
        kept = (depth, width) != (config.intermediate_size, config.hidden_size) and 8 * depth > width
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
