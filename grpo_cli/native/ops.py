"""The functions of decode.c and tree.c on tensors of a CPU, float32 or bfloat16, and the reference of the latter.

A tree is a run of tokens: a trunk (prompt) and the branches (completions) after it, given as their sizes. Each token
attends to its own span up to itself, and to the trunk of its branch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.native.library import library

PRECISIONS = (torch.float32, torch.bfloat16)
MOST_DIM = 256  # numbers of a head, as in decode.c
_LANES, _ROWS = 16, 32  # the most of vectors.h, and as in tree.c
# Of the largest number: what is lost by computing in another order, or by rounding.
_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
Trees = Sequence[Sequence[int]]


def _is_bf16(x: Tensor) -> int:
    assert x.dtype in PRECISIONS, "float32 or bfloat16"
    return x.dtype == torch.bfloat16


def norm(
    hidden: Float[Tensor, "N H"],
    delta: Float[Tensor, "N H"] | None,
    weight: Float[Tensor, "H"],
    epsilon: float,
    dtype: torch.dtype,
) -> Float[Tensor, "N H"]:
    """Add `delta` to `hidden`, in place, and return its norm."""
    out = torch.empty(hidden.shape, dtype=dtype)
    added = (0, 0) if delta is None else (delta.data_ptr(), _is_bf16(delta))
    by = weight.data_ptr(), _is_bf16(weight), epsilon
    library("decode").norm(
        *hidden.shape, hidden.data_ptr(), _is_bf16(hidden), *added, *by, out.data_ptr(), _is_bf16(out)
    )
    return out


def rotate(x: Float[Tensor, "N heads D"], cos: Float[Tensor, "N 1 D"], sin: Float[Tensor, "N 1 D"]) -> None:
    """Apply a rotary position embedding in place; the first half of `sin` has its sign."""
    args = x.data_ptr(), x.stride(0), _is_bf16(x), cos.data_ptr(), sin.data_ptr(), _is_bf16(cos)
    library("decode").rotate(*x.shape, *args)


def silu(gate: Float[Tensor, "N W"], up: Float[Tensor, "N W"]) -> Float[Tensor, "N W"]:
    """Return silu(gate) * up; both have the same distance between rows."""
    out = torch.empty(gate.shape, dtype=gate.dtype)
    args = gate.data_ptr(), up.data_ptr(), gate.stride(0), _is_bf16(gate), out.data_ptr()
    library("decode").silu(*gate.shape, *args)
    return out


def draw(
    logits: Float[Tensor, "R V"], uniform: Float[Tensor, "R"], temperature: Float[Tensor, "R"]
) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
    """Draw a token of each row, and return it with its log-probability."""
    logits, uniform = logits.contiguous(), uniform.contiguous()
    assert uniform.dtype == torch.float64 and temperature.dtype == torch.float32, "as they are drawn and kept"
    tokens, logprobs = torch.empty(len(logits), dtype=torch.long), torch.empty(len(logits))
    args = logits.data_ptr(), _is_bf16(logits), temperature.data_ptr(), uniform.data_ptr()
    library("decode").draw(*logits.shape, *args, tokens.data_ptr(), logprobs.data_ptr())
    return tokens, logprobs


# Custom operators, so that a checkpoint's policy can keep what they return and tests can run them on fake tensors.
# Their schemas are spelt out, since PyTorch reads no annotations of a function that checks its own (jaxtyping's hook).


@torch.library.custom_op(
    "grpo_cli::tree_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, int[] trees, float scale) -> (Tensor, Tensor)",
)
def tree_attention(q: Tensor, k: Tensor, v: Tensor, trees: list[int], scale: float) -> tuple[Tensor, Tensor]:
    """Compute the attention of trees, and the log-sum-exps of its scores by head.

    q is [N, heads * group, D], k and v are [N, heads, D], all contiguous; `trees` as `flat` returns them.
    """
    out, logs = _empty(q)
    _call("forward", trees, scale, q, k, q, k, v, out, logs)
    return out, logs


@torch.library.custom_op(
    "grpo_cli::tree_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logs, int[] trees, float scale) "
    "-> (Tensor, Tensor, Tensor)",
)
def tree_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, trees: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and values."""
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    _call("backward", trees, scale, q, k, grad, q, k, v, out, logs, dq, dk, dv)
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.trees, ctx.scale = inputs[3:]


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    grads = torch.ops.grpo_cli.tree_attention_backward(grad.contiguous(), *ctx.saved_tensors, ctx.trees, ctx.scale)
    return *grads, None, None


def _empty(q: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)


@tree_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, trees: list[int], scale: float) -> tuple[Tensor, Tensor]:
    return _empty(q)


@tree_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, trees: list[int], scale: float) -> Any:
    return tuple(torch.empty_like(x) for x in (q, k, v))


tree_attention.register_autograd(_gradients, setup_context=_save)


def flat(trees: Trees) -> list[int]:
    """Return the sizes of all spans, each tree's behind their number, as an operator takes them."""
    return [number for sizes in trees for number in (len(sizes), *sizes)]


def unflat(numbers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Invert `flat`."""
    trees, at = [], 0
    while at < len(numbers):
        trees.append(numbers[at + 1 : (at := at + 1 + numbers[at])])
    return tuple(trees)


@lru_cache(maxsize=1)  # every layer of a pass has the same
def _tables(numbers: tuple[int, ...]) -> tuple[tuple[ctypes.Array[Any], ...], int]:
    """Return each tree's first span, the spans' sizes and each tree's first token; and the most keys that one sees."""
    trees = unflat(numbers)
    spans = accumulate(map(len, trees), initial=0)
    starts = accumulate(map(sum, trees), initial=0)
    sizes = [size for tree in trees for size in tree]
    found = [(ctypes.c_int64 * len(table))(*table) for table in map(list, (spans, sizes, starts))]
    return tuple(found), max(tree[0] + max(tree[1:], default=0) for tree in trees)


def _scratch(q: Tensor, k: Tensor, trees: list[int]) -> tuple[Tensor, int, int]:
    """Return room for each thread, and the padded numbers of a head and of its keys."""
    (starts, *_), longest = _tables(tuple(trees))
    heads, dim = k.shape[1:]
    width, length, room = _room(longest, dim)
    threads = min(torch.get_num_threads(), (len(starts) - 1) * heads)
    return q.new_empty(threads, room, dtype=torch.float32), width, length


def _room(longest: int, dim: int) -> tuple[int, int, int]:
    width, length = -(-dim // _LANES) * _LANES, -(-longest // _LANES) * _LANES + _LANES
    return width, length, 5 * length * width + _ROWS * (2 * length + 4 * width)  # of backward, which needs more


def scratch_bytes(longest: int, dim: int) -> int:
    """Return the bytes of scratch memory of all threads together, where a token attends to at most `longest` keys."""
    return 4 * torch.get_num_threads() * _room(longest, dim)[2]


def _call(name: str, trees: list[int], scale: float, q: Tensor, k: Tensor, *others: Tensor) -> None:
    """Call the function of this name: queries and keys have the shapes, `others` are all that it is given."""
    (starts, sizes, tokens), _ = _tables(tuple(trees))
    scratch, width, length = _scratch(q, k, trees)
    assert all(x.is_contiguous() for x in others) and tokens[-1] == len(q), "rows lie one after the other"
    heads, dim = k.shape[1:]
    numbers = heads, q.shape[1] // heads, dim, _is_bf16(q), len(q), len(starts) - 1, len(scratch)
    tables = map(ctypes.addressof, (starts, sizes, tokens))
    of = [*numbers, *tables, width, length, scratch.data_ptr(), scratch.shape[1]]
    getattr(library("tree"), name)((ctypes.c_int64 * len(of))(*of), scale, *(x.data_ptr() for x in others))


def reference(
    q: Float[Tensor, "N HG D"], k: Float[Tensor, "N H D"], v: Float[Tensor, "N H D"], trees: Trees, scale: float
) -> Float[Tensor, "N HG D"]:
    """Compute the attention of trees by PyTorch's, span by span, on any device."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    sizes = [size for tree in trees for size in tree]
    # Split once: the backward of a slice is a whole tensor of zeros, that of a split one concatenation.
    spans, found = zip(*(x.transpose(0, 1).split(sizes, dim=1) for x in (q, k, v)), strict=True), []
    for _, *branches in trees:
        query, *trunk = next(spans)
        found.append(F.scaled_dot_product_attention(query, trunk[0], trunk[1], is_causal=True, scale=scale))
        for size in branches:
            own, *seen = next(spans)
            keys, values = (torch.cat(pair, dim=1) for pair in zip(trunk, seen, strict=True))
            mask = torch.ones(size, keys.shape[1], dtype=torch.bool, device=q.device).tril(keys.shape[1] - size)
            found.append(F.scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scale))
    return torch.cat(found, dim=1).transpose(0, 1)


@cache
def tree_attention_is_exact(heads: int, group: int, dim: int, dtype: torch.dtype) -> bool:
    """True if tree.c computes what the reference does in float32, but for rounding, on heads of this shape and type.
    NoNative if it cannot be compiled."""
    trees, found = ((20, 5, 41), (3,), (1, 2)), []
    generator, tokens = torch.Generator().manual_seed(0), sum(map(sum, trees))
    shapes = [(tokens, count * heads, dim) for count in (group, 1, 1, group)]
    q, k, v, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    for natively in (True, False):
        with torch.enable_grad():
            runs = q_, k_, v_ = [
                x.to(dtype if natively else torch.float32, copy=True).requires_grad_() for x in (q, k, v)
            ]
            scale = dim**-0.5
            out = tree_attention(*runs, flat(trees), scale)[0] if natively else reference(q_, k_, v_, trees, scale)
            found.append([out.detach(), *torch.autograd.grad(out, runs, grad.to(out.dtype))])
    errors = ((c.float() - exact).abs().max() / exact.abs().max() for c, exact in zip(*found, strict=True))
    return all(float(error) <= _CLOSE[dtype] for error in errors)
