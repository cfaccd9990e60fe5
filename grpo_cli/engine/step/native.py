"""A decode step on a CPU around its products, in C (`native/decode.c`): a few calls a layer in place of some forty."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.gpu.compiled import Functions
from grpo_cli.engine.kv.cache import KvArena
from grpo_cli.engine.kv.rows import Rows, Watch
from grpo_cli.engine.kv.tiles import Pieces
from grpo_cli.engine.step.block import Block, Norm, is_silu
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


class NativeAttention:
    """`StepAttention` in C, for a step of whose attention only the queries are watched."""

    def __init__(self, rows: Rows, kv: KvArena, group: int, scale: float, watch: Watch) -> None:
        own, prompt, layout = rows.own, rows.prompt, kv.layout
        assert isinstance(own, Pieces) and isinstance(prompt, Pieces), "the layout is not by token"
        count, self._dtype, self._scale = len(rows.tokens), layout.dtype, scale
        self._shape = count, layout.heads * group * layout.dim
        pages, of_prompt = own.pages, prompt.pages
        held, seen = (pages, rows.lengths, rows.write_to.contiguous()), (of_prompt, prompt.seen)
        of = [count, layout.heads, group, layout.dim, layout.dtype == torch.bfloat16]
        of += [*(x.data_ptr() for x in held), pages.shape[1], kv.rows.tokens]
        of += [*(x.data_ptr() for x in seen), of_prompt.shape[1], kv.prompts.tokens]
        self._kept = held, seen  # for as long as their addresses are used
        self._see = watch.see
        self._step = (ctypes.c_int64 * len(of))(*of)
        by_layer = zip(kv.row_keys, kv.row_values, kv.prompt_keys, kv.prompt_values, strict=True)
        self._pages = [[views.data_ptr() for views in layer] for layer in by_layer]
        watch.prepare(rows)

    def __call__(
        self, layer: int, q: Float[Tensor, "R HG D"], k: Float[Tensor, "R H D"], v: Float[Tensor, "R H D"]
    ) -> Float[Tensor, "R HGD"]:
        dtype = self._dtype
        if q.dtype != dtype or k.dtype != dtype or v.dtype != dtype:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        out = torch.empty(self._shape, dtype=dtype)
        asked = q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        library("decode").attend(self._step, self._scale, *asked, *self._pages[layer], out.data_ptr())
        self._see(layer, q, None)
        return out
