"""The multiplications and additions of any model, counted by PyTorch on the run's own code with fake tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from grpo_cli.learner.forward import Padded, RowShape
from grpo_cli.profile.shapes import ShapeModel

Counted = Counter[Any]  # operations by kind


@dataclass(frozen=True)
class Operations:
    """Multiplications plus additions of a pass: per token through the layers, per token whose logits are computed, and
    per pair of a token and one that it attends to (itself included)."""

    token: int
    logits: int
    pair: int

    @classmethod
    def between(cls, two: Counted, three: Counted) -> Operations:
        """Derived from the counts of a row of two tokens and one of three, each with the logits of one token."""
        attending = sum(three[op] for op in _ATTENTION)
        pair = attending // 6
        token = three.total() - two.total() - 3 * pair
        return cls(token, three.total() - attending - 3 * token, pair)

    def of(self, tokens: int, asked: int, pairs: int) -> int:
        return self.token * tokens + self.logits * asked + self.pair * pairs


def _seen(whole: int, tokens: int, is_causal: bool) -> int:
    """Half of the square, and half of its diagonal."""
    return whole * (tokens + 1) // (2 * tokens) if is_causal else whole


def _attention(query: Any, key: Any, value: Any, dropout: float = 0.0, is_causal: bool = False, **_: Any) -> int:
    return _seen(sdpa_flop_count(query, *_each(query, key, value)), query[-2], is_causal)


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, dropout: float, is_causal: bool, **_: Any
) -> int:
    return _seen(sdpa_backward_flop_count(grad, query, *_each(query, key, value)), query[-2], is_causal)


def _each(query: Any, *shared: Any) -> list[tuple[int, ...]]:
    """Keys and values with a head for each of the query's: PyTorch 2.11 takes no other number of them."""
    return [(batch, query[1], length, size) for batch, _, length, size in shared]


# PyTorch does not count the CPU's attention, which fake tensors use, and treats none as causal elsewhere.
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def operations_of(shapes: ShapeModel) -> tuple[Operations, Operations, Operations]:
    """Of rollouts (with adapters merged), of a forward and of a backward pass, as the run's code makes them: recomputed
    layers and logits count again."""
    forward, backward = map(Operations.between, _counted(shapes, 2), _counted(shapes, 3))
    if not hasattr(shapes.model, "disable_adapter"):
        return forward, forward, backward
    with shapes.model.disable_adapter():
        rollout = Operations.between(_counted(shapes, 2)[0], _counted(shapes, 3)[0])
    return rollout, forward, backward


def _counted(shapes: ShapeModel, tokens: int) -> tuple[Counted, Counted]:
    """Of a row's forward and backward pass, with the logits of one token; told from one layer and two if all are alike,
    since then each makes as many."""
    if not shapes.alike:
        return _of_a_row(shapes, tokens)
    with shapes.layers(1):
        one = _of_a_row(shapes, tokens)
    with shapes.layers(2):
        two = _of_a_row(shapes, tokens)
    forward, backward = (
        Counter({op: a[op] + (shapes.depth - 1) * (b[op] - a[op]) for op in b}) for a, b in zip(one, two, strict=True)
    )
    return forward, backward


def _of_a_row(shapes: ShapeModel, tokens: int) -> tuple[Counted, Counted]:
    forward, backward = (FlopCounterMode(display=False, custom_mapping=_ATTENTION) for _ in range(2))
    with shapes.watched(training=True):
        with forward, shapes.precision():
            values = Padded(1, 1, 1.0).blank(shapes.model, [RowShape(tokens - 1, 1)])
        with backward:
            if values.requires_grad:
                values.sum().backward()
    one, two = (Counter(mode.get_flop_counts().get("Global", {})) for mode in (forward, backward))
    return one, two
