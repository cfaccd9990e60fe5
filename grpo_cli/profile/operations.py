"""What a model multiplies and adds, counted by PyTorch on the run's own code and fake tensors, whatever the model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from grpo_cli.learner.forward import Padded, RowShape
from grpo_cli.profile.shapes import ShapeModel


@dataclass(frozen=True)
class Operations:
    """What a pass multiplies and adds (each counts): for a token that goes through the layers, for one whose logits are
    asked for, and for a token and one that it attends to, itself included."""

    token: int
    logits: int
    pair: int

    @classmethod
    def between(cls, two: FlopCounterMode, three: FlopCounterMode) -> Operations:
        """Told from a row of two tokens and one of three, of which the logits of one are asked for."""
        attending = sum(three.get_flop_counts().get("Global", {}).get(op, 0) for op in _ATTENTION)
        pair = attending // 6
        token = three.get_total_flops() - two.get_total_flops() - 3 * pair
        return cls(token, three.get_total_flops() - attending - 3 * token, pair)

    def of(self, tokens: int, asked: int, pairs: int) -> int:
        return self.token * tokens + self.logits * asked + self.pair * pairs


def _seen(whole: int, tokens: int, is_causal: bool) -> int:
    """Half of the square, and half of its diagonal."""
    return whole * (tokens + 1) // (2 * tokens) if is_causal else whole


def _attention(query: Any, key: Any, value: Any, dropout: float = 0.0, is_causal: bool = False, **_: Any) -> int:
    return _seen(sdpa_flop_count(query, key, value), query[-2], is_causal)


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, dropout: float, is_causal: bool, **_: Any
) -> int:
    return _seen(sdpa_backward_flop_count(grad, query, key, value), query[-2], is_causal)


# PyTorch counts no attention of a CPU, where fake tensors lie, and elsewhere takes none for causal.
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def operations_of(shapes: ShapeModel) -> tuple[Operations, Operations, Operations]:
    """Of rollouts (adapters are merged for them), of a pass forward and of one backward, as the run's code makes them:
    layers that are recomputed and logits that are made again count."""
    forward, backward = (
        Operations.between(*both) for both in zip(_counted(shapes, 2), _counted(shapes, 3), strict=True)
    )
    with shapes.model.disable_adapter() if hasattr(shapes.model, "disable_adapter") else nullcontext():
        rollout = Operations.between(_counted(shapes, 2)[0], _counted(shapes, 3)[0])
    return rollout, forward, backward


def _counted(shapes: ShapeModel, tokens: int) -> tuple[FlopCounterMode, FlopCounterMode]:
    """A row's pass forward and the one backward. The logits of one token are asked for."""
    forward, backward = (FlopCounterMode(display=False, custom_mapping=_ATTENTION) for _ in range(2))
    with shapes.watched(training=True):
        with forward, shapes.precision():
            values = Padded(1, 1, 1.0).blank(shapes.model, [RowShape(tokens - 1, 1)])
        with backward:
            if values.requires_grad:
                values.sum().backward()
    return forward, backward
