"""One layer of a Llama-shaped model as two functions around its attention, over the layer's own modules.

Norms, rotation and activation compute what the modules compute, with the same rounding, in fewer calls; on a CPU in
such a way that a row's bits do not depend on the rest of the batch. They run in PyTorch's operations, in C on a CPU
(`native/decode.c`: a few calls a layer in place of some forty), or through torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.rollout_weights import AsTheyAre, Copies, Product, Products, Split, is_plain
from grpo_cli.engine.running_batch import bucket
from grpo_cli.model.compiling import Compiler
from grpo_cli.native import ops


def _last(norm: Callable[..., Any], hidden: Any) -> Any:
    return norm(hidden)


@dataclass(frozen=True)
class Functions:
    """A layer before and after its attention, and the model's last norm. What `after` returns is for `before` and
    `last`."""

    before: Callable[..., Any]
    after: Callable[..., Any]
    last: Callable[..., Any] = _last
    compiled: bool = False

    def rows(self, count: int) -> int:
        """Return how many rows to lay out for `count`: compiled functions have fixed shapes."""
        return bucket(count) if self.compiled else count


@dataclass(frozen=True)
class Block:
    """The modules of one layer, looked up once: attribute access on a module is slow."""

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
    def of(cls, layer: Any, weights: AsTheyAre | Copies) -> Block:
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            input_norm=norm_of(layer.input_layernorm),
            qkv=weights.together(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=norm_of(getattr(attention, "q_norm", None)),
            k_norm=norm_of(getattr(attention, "k_norm", None)),
            o_proj=weights.of(attention.o_proj),
            post_norm=norm_of(layer.post_attention_layernorm),
            gate_up=weights.together(mlp.gate_proj, mlp.up_proj),
            activation=_activation(mlp.act_fn),
            down_proj=weights.of(mlp.down_proj),
        )

    @property
    def is_plain(self) -> bool:
        """True if it consists of plain weights only, so that one compilation serves all layers."""
        products = (self.qkv, self.o_proj, self.gate_up, self.down_proj)
        norms = (self.input_norm, self.q_norm, self.k_norm, self.post_norm)
        plain = all(map(is_plain, products)) and all(norm is None or type(norm) is Norm for norm in norms)
        return plain and is_silu(self.activation)


@dataclass(frozen=True)
class Norm:
    """Computes what an RMS norm's module computes, with the same rounding, in fewer calls."""

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x.float(), self.weight.shape, eps=self.epsilon).to(x.dtype) * self.weight
        root = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x * root.square_().div_(x.shape[-1]).add_(self.epsilon).rsqrt_()).to(x.dtype) * self.weight


def norm_of(module: Any) -> Any:
    """Return the module, or a `Norm` for RMS norms."""
    if module is None or not type(module).__name__.endswith("RMSNorm"):
        return module
    return Norm(module.weight, module.variance_epsilon)


def before_attention(
    block: Block, hidden: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a block as [N, heads, dim], the first two rotated."""
    x = block.input_norm(hidden).to(dtype)
    q, k, v = (each.view(x.shape[0], -1, cos.shape[-1]) for each in block.qkv(x))
    if block.q_norm is not None and block.k_norm is not None:
        q, k = block.q_norm(q), block.k_norm(k)
    both = _rotate(torch.cat([q, k], dim=1), cos, sin).to(v.dtype)
    return both[:, : q.shape[1]], both[:, q.shape[1] :], v


def after_attention(block: Block, hidden: Tensor, attended: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rest of the block."""
    hidden = hidden + block.o_proj(attended)
    return hidden + _mlp(block, block.post_norm(hidden).to(dtype))


EAGER = Functions(before_attention, after_attention)


def _mlp(block: Block, x: Float[Tensor, "N H"]) -> Float[Tensor, "N H"]:
    gate, up = block.gate_up(x)
    return block.down_proj(block.activation(gate).mul_(up))


def _activation(module: Any) -> Any:
    """Return the module, or for SiLU a version that gives an element the same bits at any position.

    PyTorch's silu is vectorised except for the end of each thread's share, where it uses a different exponential, so
    that bits depend on the number of rows. `exp` alone is computed the same way throughout.
    """
    return _silu if type(module).__name__ in ("SiLU", "SiLUActivation") else module


def is_silu(activation: Any) -> bool:
    """True if it is what `_activation` has for SiLU."""
    return activation is _silu


def _silu(x: Float[Tensor, "N F"]) -> Float[Tensor, "N F"]:
    """x / (1 + exp(-x)). A GPU treats all elements alike, and one call is cheaper than four."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.silu(x)
    return x / x.neg().exp_().add_(1.0)


def _rotate(x: Float[Tensor, "N heads D"], cos: Float[Tensor, "N 1 D"], sin: Float[Tensor, "N 1 D"]) -> Tensor:
    """Rotary position embedding, halves convention (as in all supported families); `sin` carries the sign."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def compiled(functions: Functions, warn: Callable[[str], None]) -> Functions:
    """Compile functions; if compiling one fails, all run uncompiled, with one warning."""
    before, after = map(Compiler(warn), (functions.before, functions.after))
    return Functions(before, after, compiled=True)


# A layer's input, and what is still to be added to it.
Sum = tuple[Float[Tensor, "N H"], Float[Tensor, "N H"] | None]


def native_before(
    block: Block, hidden: Tensor | Sum, cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `before_attention`, and add up the sum in place."""
    hidden, delta = _parts(hidden)
    x, dim = _normed(hidden, delta, block.input_norm, dtype), cos.shape[-1]
    if type(block.qkv) is Split and block.q_norm is None:
        together = block.qkv.product(x).view(len(x), -1, dim)
        q, k, v = together.split([size // dim for size in block.qkv.sizes], 1)
        ops.rotate(together[:, : q.shape[1] + k.shape[1]], cos, sin)
        return q, k, v
    q, k, v = (each.view(len(x), -1, dim) for each in block.qkv(x))
    if block.q_norm is not None and block.k_norm is not None:
        q, k = block.q_norm(q).to(v.dtype), block.k_norm(k).to(v.dtype)
    for each in (q, k):
        ops.rotate(each, cos, sin)
    return q, k, v


def native_after(block: Block, hidden: Tensor | Sum, attended: Tensor, dtype: torch.dtype) -> Sum:
    """Compute `after_attention` over the memory of `hidden`."""
    hidden, _ = _parts(hidden)
    gate, up = block.gate_up(_normed(hidden, block.o_proj(attended), block.post_norm, dtype))
    return hidden, block.down_proj(ops.silu(gate, up))


def native_last(by: Norm, hidden: Tensor | Sum) -> Float[Tensor, "N H"]:
    x, delta = _parts(hidden)
    return _normed(x, delta, by, x.dtype)


def _normed(hidden: Tensor, delta: Tensor | None, by: Norm, dtype: torch.dtype) -> Float[Tensor, "N H"]:
    return ops.norm(hidden, delta, by.weight, by.epsilon, dtype)


def _parts(hidden: Tensor | Sum) -> Sum:
    return hidden if isinstance(hidden, tuple) else (hidden, None)


def serves_natively(block: Block, last: Any) -> bool:
    """True if all of a model with such blocks can run here."""
    norms = [block.input_norm, block.post_norm, last]
    return all(type(norm) is Norm for norm in norms) and is_silu(block.activation)


NATIVE = Functions(native_before, native_after, native_last)
