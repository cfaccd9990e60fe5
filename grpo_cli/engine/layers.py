"""One layer of a Llama-shaped model as two functions around its attention, over products that last for one generation.

Norms, rotation and activation compute what the modules compute, with the same rounding, in fewer calls. They run in
PyTorch's operations, in C on a CPU (`native/decode.c`: a few calls a layer in place of some forty, and a row's bits do
not depend on the rest of the batch), or through torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from grpo_cli.engine.products import Product, Products, Weights
from grpo_cli.native import ops


@dataclass(frozen=True)
class Block:
    """The parts of one layer, looked up once: attribute access on a module is slow."""

    input_norm: Any
    qkv: Products
    q_norm: Any | None
    k_norm: Any | None
    o_proj: Product
    post_norm: Any
    gate_up: Products
    activation: Any
    down_proj: Product

    @classmethod
    def of(cls, layer: Any, weights: Weights) -> Block:
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            input_norm=norm_of(layer.input_layernorm),
            qkv=weights.together(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=norm_of(getattr(attention, "q_norm", None)),
            k_norm=norm_of(getattr(attention, "k_norm", None)),
            o_proj=weights.of(attention.o_proj),
            post_norm=norm_of(layer.post_attention_layernorm),
            gate_up=weights.together(mlp.gate_proj, mlp.up_proj),
            activation=activation_of(mlp.act_fn),
            down_proj=weights.of(mlp.down_proj),
        )


def is_plain(part: Any) -> bool:
    """True if it consists of weights only, without modules, so that one compilation serves all layers."""
    if isinstance(part, tuple):
        return all(map(is_plain, part))
    if is_dataclass(part):
        return all(is_plain(getattr(part, field.name)) for field in fields(part))
    return not isinstance(part, nn.Module)


@dataclass(frozen=True)
class Norm:
    """An RMS norm with the rounding of its module, in fewer calls."""

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x.float(), self.weight.shape, eps=self.epsilon).to(x.dtype) * self.weight
        root = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)  # the same bits in any batch
        return (x * root.square_().div_(x.shape[-1]).add_(self.epsilon).rsqrt_()).to(x.dtype) * self.weight


def norm_of(module: Any) -> Any:
    """Return the module, or a `Norm` for RMS norms."""
    if module is None or not type(module).__name__.endswith("RMSNorm"):
        return module
    return Norm(module.weight, module.variance_epsilon)


class Functions:
    """A layer around its attention, in PyTorch's operations. `delta` is what `add` has left to the next norm."""

    def before(
        self, block: Block, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values of a block as [N, heads, dim], the first two rotated."""
        x = self.norm(block.input_norm, hidden, delta, dtype)
        q, k, v = (each.view(len(x), -1, cos.shape[-1]) for each in block.qkv(x))
        if block.q_norm is not None and block.k_norm is not None:
            q, k = block.q_norm(q), block.k_norm(k)
        q, k = self.rotate(q, k, cos, sin, v.dtype)
        return q, k, v

    def after(self, block: Block, hidden: Tensor, attended: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Compute the rest of the block: the next layer's `hidden` and `delta`."""
        hidden, delta = self.add(hidden, block.o_proj(attended))
        gate, up = block.gate_up(self.norm(block.post_norm, hidden, delta, dtype))
        return self.add(hidden, block.down_proj(self.activate(block.activation, gate, up)))

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor | None]:
        return hidden + delta, None

    def norm(self, by: Any, hidden: Tensor, delta: Tensor | None, dtype: torch.dtype) -> Tensor:
        return by(hidden).to(dtype)

    def rotate(
        self, q: Tensor, k: Tensor, cos: Float[Tensor, "N 1 D"], sin: Float[Tensor, "N 1 D"], dtype: torch.dtype
    ) -> Sequence[Tensor]:
        """Apply a rotary embedding, halves convention (as in all supported families); `sin` has the sign."""
        x = torch.cat([q, k], dim=1)
        x = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(dtype)
        return x.split([q.shape[1], k.shape[1]], 1)

    def activate(self, activation: Any, gate: Tensor, up: Tensor) -> Tensor:
        return activation(gate).mul_(up)


class Native(Functions):
    """The same in C, over the memory of `hidden`, queries and keys."""

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor | None]:
        return hidden, delta

    def norm(self, by: Norm, hidden: Tensor, delta: Tensor | None, dtype: torch.dtype) -> Tensor:
        return ops.norm(hidden, delta, by.weight, by.epsilon, dtype)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        q, k = q.to(dtype), k.to(dtype)
        for each in (q, k):
            ops.rotate(each, cos, sin)
        return q, k

    def activate(self, activation: Any, gate: Tensor, up: Tensor) -> Tensor:
        return ops.silu(gate, up)


class Compiled(Functions):
    """The same through torch.compile, which has fixed shapes."""

    def __init__(self, compiler: Callable[[Callable[..., Any]], Any]) -> None:
        self.before = compiler(EAGER.before)  # type: ignore[method-assign]
        self.after = compiler(EAGER.after)  # type: ignore[method-assign]


EAGER, NATIVE = Functions(), Native()


def activation_of(module: Any) -> Any:
    """Return the module, or a function for SiLU, so that a layer is plain."""
    return F.silu if type(module).__name__ in ("SiLU", "SiLUActivation") else module
