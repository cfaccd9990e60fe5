"""A decode step on a CPU around its products, in C (`native/decode.c`): a few calls a layer in place of some forty."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.gpu.compiled import Functions
from grpo_cli.engine.kv.cache import BLOCK, PagedCache
from grpo_cli.engine.step.attention import Attention
from grpo_cli.engine.step.block import Block, Norm, is_silu
from grpo_cli.engine.step.rows import Rows
from grpo_cli.engine.step.weights import Split
from grpo_cli.native.library import library
from grpo_cli.native.ops import norm, rotate, silu

# A layer's input, and what is still to be added to it.
Sum = tuple[Float[Tensor, "N H"], Float[Tensor, "N H"] | None]


def before(
    block: Block, hidden: Tensor | Sum, cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `before_attention`, and add up the sum in place."""
    hidden, delta = _parts(hidden)
    x, dim = _normed(hidden, delta, block.input_norm, dtype), cos.shape[-1]
    if type(block.qkv) is Split and block.q_norm is None:
        together = block.qkv.product(x).view(len(x), -1, dim)
        q, k, v = together.split([size // dim for size in block.qkv.sizes], 1)
        rotate(together[:, : q.shape[1] + k.shape[1]], cos, sin)
        return q, k, v
    q, k, v = (each.view(len(x), -1, dim) for each in block.qkv(x))
    if block.q_norm is not None and block.k_norm is not None:
        q, k = block.q_norm(q).to(v.dtype), block.k_norm(k).to(v.dtype)
    for each in (q, k):
        rotate(each, cos, sin)
    return q, k, v


def after(block: Block, hidden: Tensor | Sum, attended: Tensor, dtype: torch.dtype) -> Sum:
    """Compute `after_attention` over the memory of `hidden`."""
    hidden, _ = _parts(hidden)
    gate, up = block.gate_up(_normed(hidden, block.o_proj(attended), block.post_norm, dtype))
    return hidden, block.down_proj(silu(gate, up))


def last(by: Norm, hidden: Tensor | Sum) -> Float[Tensor, "N H"]:
    x, delta = _parts(hidden)
    return _normed(x, delta, by, x.dtype)


def _normed(hidden: Tensor, delta: Tensor | None, by: Norm, dtype: torch.dtype) -> Float[Tensor, "N H"]:
    return norm(hidden, delta, by.weight, by.epsilon, dtype)


def _parts(hidden: Tensor | Sum) -> Sum:
    return hidden if isinstance(hidden, tuple) else (hidden, None)


def serves(block: Block, last: Any) -> bool:
    """True if all of a model with such blocks can run here."""
    norms = [block.input_norm, block.post_norm, last]
    return all(type(norm) is Norm for norm in norms) and is_silu(block.activation)


FUNCTIONS = Functions(before, after, last)


def attention(rows: Rows, cache: PagedCache, scale: float) -> Attention:
    """Attention in one call for each layer."""
    layout, dtype = cache.layout, cache.layout.dtype
    tables = [x.contiguous() for x in (rows.own, rows.held, rows.write_to, rows.prompt, rows.seen)]
    own, held, write_to, prompt, seen = (x.data_ptr() for x in tables)
    of = [len(rows.tokens), layout.heads, layout.group, layout.dim, dtype == torch.bfloat16]
    of += [own, held, write_to, tables[0].shape[1], BLOCK, prompt, seen, tables[3].shape[1], BLOCK]
    step = (ctypes.c_int64 * len(of))(*of)
    memory = [memory.data_ptr() for memory in cache.memory]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        if q.dtype != dtype or k.dtype != dtype or v.dtype != dtype:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        out = torch.empty((len(tables[0]), q.shape[1] * q.shape[2]), dtype=dtype)
        given = q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        both = memory[layer], memory[layer + layout.layers]
        library("decode").attend(step, scale, *given, *both, *both, out.data_ptr())
        return out, None

    return attend
