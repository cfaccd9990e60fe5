"""Attention of one decode step over tables of blocks: each row sees its prompt's keys, its own, and its new one.

There are three backends: C on a CPU (`native/decode.c`), Triton kernels on a GPU (`triton_attention.py`), and
PyTorch's operations, which run anywhere. The first and the last also return the attention that keys receive.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from importlib.util import find_spec
from shutil import which

import torch
from torch import Tensor

from grpo_cli.engine.kv_cache import BLOCK, PagedCache
from grpo_cli.engine.sequence import Rows
from grpo_cli.native.library import library

# What a layer's rows attend to, [R, HGD], of its number, queries, keys and values, which it adds to the cache.
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# Takes, by layer, the attention [R, H, n] that the keys of each row's prompt and then its own received: the mean over a
# key head's queries, float32.
Note = Callable[[int, Tensor], None]


def reference(rows: Rows, cache: PagedCache, scale: float, note: Note | None = None) -> Attention:
    """Return attention by PyTorch's operations, scores at least float32."""
    blocks, own = torch.cat([rows.prompt, rows.own], dim=1), BLOCK * rows.prompt.shape[1]
    place = torch.arange(BLOCK * blocks.shape[1], device=blocks.device)
    hidden = torch.where(place < own, place >= rows.seen[:, None], place - own > rows.held[:, None])[:, None, None]
    inside = rows.held.remainder(BLOCK)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        views = cache.keys[layer], cache.values[layer]
        for view, new in zip(views, (k, v), strict=True):
            view[rows.write_to, :, inside] = new.to(view.dtype)
        keys, values = cache.read(views, blocks, len(place))
        exact = torch.promote_types(keys.dtype, torch.float32)
        scores = q.to(keys.dtype).unflatten(1, (k.shape[1], -1)).to(exact) @ keys.to(exact).mT * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(keys.dtype)
        if note is not None:
            note(layer, weights.mean(2, dtype=torch.float32))
        return (weights @ values.masked_fill(hidden.mT, 0.0)).flatten(1)

    return attend


def in_c(rows: Rows, cache: PagedCache, scale: float, note: Note | None = None) -> Attention:
    """Return an attention that calls C once for each layer."""
    layout, dtype = cache.layout, cache.layout.dtype
    tables = [x.contiguous() for x in (rows.own, rows.held, rows.write_to, rows.prompt, rows.seen)]
    own, held, write_to, prompt, seen = (x.data_ptr() for x in tables)
    count, widths = len(tables[0]), (tables[3].shape[1], tables[0].shape[1])
    of = [count, layout.heads, layout.group, layout.dim, dtype == torch.bfloat16]
    of += [write_to, prompt, own, *widths, seen, held]
    step = (ctypes.c_int64 * len(of))(*of)
    memory, attend_in_c = [memory.data_ptr() for memory in cache.memory], library("decode").attend

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.dtype != dtype or k.dtype != dtype or v.dtype != dtype:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        out = torch.empty((len(tables[0]), q.shape[1] * q.shape[2]), dtype=dtype)  # which keeps the tables alive
        received = None if note is None else torch.zeros(count, layout.heads, BLOCK * sum(widths))
        given = q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        where = memory[layer], memory[layer + layout.layers], out.data_ptr()
        attend_in_c(step, scale, *given, *where, None if received is None else received.data_ptr())
        if note is not None and received is not None:
            note(layer, received)
        return out

    return attend


def runs_triton(device: torch.device, dim: int) -> bool:
    """True if the kernel can run on this device, for heads of this dimension."""
    if device.type != "cuda" or dim > 256 or torch.version.hip:
        return False
    if not torch.cuda.is_available():  # tensors without memory
        return True
    compiler = which(os.environ.get("CC") or "gcc") or which("clang")  # of Triton's launcher
    there = compiler is not None and find_spec("triton") is not None
    return there and torch.cuda.get_device_capability(device) >= (8, 0)


# Spelt out, since PyTorch reads no annotations of a function that checks its own (jaxtyping's hook).
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a3!) keys, Tensor(a4!) values, Tensor own, Tensor held, Tensor write_at, "
    "Tensor prompt, Tensor seen, float scale) -> Tensor"
)


@torch.library.custom_op("grpo_cli::paged_attention", mutates_args=("keys", "values"), schema=_SCHEMA)
def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, own: Tensor, held: Tensor, write_at: Tensor,
    prompt: Tensor, seen: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Compute each row's attention over its prompt's keys, its own, and its new one, which is written too.

    q is [R, HG, D], k and v [R, H, D]; keys and values [tokens, H, D]; own and prompt [R, K] are tables of blocks;
    held, write_at and seen [R]: keys of a row before the step, where its new one goes, keys of its prompt.
    """
    from grpo_cli.engine.triton_attention import launch

    return launch(q, k, v, keys, values, BLOCK, own, held, write_at, prompt, seen, scale)


@triton_attention.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q)


def by_triton(rows: Rows, cache: PagedCache, scale: float, note: Note | None = None) -> Attention:
    """Return an attention that launches one Triton kernel for each layer."""
    assert note is None, "the kernel returns no weights"
    write_at = rows.write_to * BLOCK + rows.held.remainder(BLOCK)
    memory = [memory.view(-1, *memory.shape[2:]) for memory in cache.memory]
    tables = rows.own, rows.held, write_at, rows.prompt, rows.seen

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = memory[layer], memory[layer + cache.layout.layers]
        return triton_attention(*(x.to(keys.dtype) for x in (q, k, v)), keys, values, *tables, scale).flatten(1)

    return attend
