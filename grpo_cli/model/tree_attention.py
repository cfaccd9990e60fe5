"""Attention of packed trees on a CPU in C (`tree_attention.c`): one call for a layer forward, one backward.

As `varlen.py` computes it, and faster: PyTorch's kernel takes one sequence at a time, a trunk's branches apart
from what they see of it, and in the backward pass is slow where sequences are short.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from grpo_cli.support.c_library import NoNative, library

SOURCE = Path(__file__).with_suffix(".c")
PRECISIONS = (torch.float32, torch.bfloat16)
_LANES, _ROWS = 16, 32  # as in vectors.h and tree_attention.c
_CLOSE = 1e-5  # of the largest number: what is lost by computing in another order


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether it computes on numbers of this type and device."""
    return q.device.type == "cpu" and q.dtype == k.dtype == v.dtype in PRECISIONS and not isinstance(q, FakeTensor)


class Forest:
    """Trees, given as the sizes of their trunk and branches, as tree_attention.c reads them."""

    def __init__(self, trees: Sequence[Sequence[int]]) -> None:
        starts = np.cumsum([0, *(sum(sizes) for sizes in trees)])
        spans, sizes = np.cumsum([0, *map(len, trees)]), np.concatenate([np.array(some) for some in trees])
        self._tables = [np.ascontiguousarray(table, np.int64) for table in (spans, sizes, starts)]
        self._tokens, self._trees = int(starts[-1]), len(trees)
        longest = max(sizes[0] + max(sizes[1:], default=0) for sizes in trees)
        self._length = -(-longest // _LANES) * _LANES + _LANES

    def call(self, name: str, scale: float, q: Tensor, k: Tensor, *others: Tensor) -> None:
        """The function of this name: queries and keys say of which shape, `others` are all that it is given."""
        heads, dim = k.shape[1:]
        width, threads = -(-dim // _LANES) * _LANES, min(torch.get_num_threads(), self._trees * heads)
        room = 5 * self._length * width + _ROWS * (2 * self._length + 4 * width)  # of backward, which needs more
        scratch = torch.empty(threads, room)
        assert all(x.is_contiguous() for x in others), "rows lie one after the other"
        numbers = heads, q.shape[1] // heads, dim, q.dtype == torch.bfloat16, self._tokens, self._trees, threads
        tables = (table.ctypes.data for table in self._tables)
        of = [*numbers, *tables, width, self._length, scratch.data_ptr(), room]
        getattr(library(SOURCE), name)((ctypes.c_int64 * len(of))(*of), scale, *(x.data_ptr() for x in others))


class _InC(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: Forest, scale: float) -> Tensor:
        out, logs = torch.empty_like(q), torch.empty(q.shape[1], len(q))
        run.call("forward", scale, q, k, q, k, v, out, logs)
        ctx.asked = run, scale
        ctx.save_for_backward(q, k, v, out, logs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (run, scale), (q, k, v, out, logs) = ctx.asked, ctx.saved_tensors
        made = [torch.empty_like(x) for x in (q, k, v)]
        run.call("backward", scale, q, k, grad.contiguous(), q, k, v, out, logs, *made)
        return *made, None, None


def attention(
    q: Float[Tensor, "N HG D"], k: Float[Tensor, "N H D"], v: Float[Tensor, "N H D"], run: Forest, scale: float
) -> Float[Tensor, "N HG D"]:
    """Each token attends to its own span, causally, and to the trunk of its branch; for runs that it `serves`."""
    found: Tensor = _InC.apply(q, k, v, run, scale)
    return found


@cache
def why_not(heads: int, group: int, dim: int) -> NoNative | None:
    """Why such heads are left to PyTorch's kernel: there is no compiler, or what it made computes something else. None
    if they are computed here."""
    try:
        library(SOURCE)
    except NoNative as error:
        return error
    sizes = (20, 5, 41), (3,), (1, 2)
    generator, tokens = torch.Generator().manual_seed(0), sum(map(sum, sizes))
    q, k, v, grad = (torch.randn(tokens, count * heads, dim, generator=generator) for count in (group, 1, 1, group))
    found = []
    for run in (Forest(sizes), None):
        with torch.enable_grad():
            runs = [x.clone().requires_grad_() for x in (q, k, v)]
            out = _written_out(runs, sizes) if run is None else _InC.apply(*runs, run, dim**-0.5)
            found.append([out.detach(), *torch.autograd.grad(out, runs, grad)])
    if all(float((ours - exact).abs().max() / exact.abs().max()) <= _CLOSE for ours, exact in zip(*found, strict=True)):
        return None
    return NoNative("what the C compiler made computes something else than PyTorch")


def _written_out(runs: Sequence[Tensor], trees: Sequence[Sequence[int]]) -> Tensor:
    """The definition: each token's scores of all others, of which most are hidden."""
    q, k, v = runs
    spans = [(tree, span) for tree, sizes in enumerate(trees) for span, size in enumerate(sizes) for _ in range(size)]
    (tree, span), place = torch.tensor(spans).t(), torch.arange(len(q))
    sees = (tree[:, None] == tree) & ((span[:, None] == span) | (span == 0)) & (place <= place[:, None])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)
