"""The Triton kernels of `attention.triton_attention`. Imported only where a GPU runs them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of 13 shapes and four numbers of programs the fastest on an H100, over four sizes of model and batch.
BLOCK, WARPS, STAGES, PROGRAMS = 64, 2, 2, 512  # keys at a time; programs that keep a GPU busy


@triton.jit
def _keys_of(pages, page, token, mask, heads: tl.constexpr):
    """Return where each token's keys begin: its page's place in the table, then its place in the page."""
    return (tl.load(pages + token // page, mask=mask, other=0) * page + token % page).to(tl.int64) * heads


@triton.jit
def _attend(q, keys, values, pages, page, low, high, head, top, total, out, scale,
            H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Add the keys from `low` to `high` of a table to a running softmax in base 2."""
    dims = tl.arange(0, DP)
    for start in range(low, high, BLOCK):
        token = start + tl.arange(0, BLOCK)
        mask = token < high
        at = (_keys_of(pages, page, token, mask, H) + head)[:, None] * D + dims[None, :]
        there = mask[:, None] & (dims < D)[None, :]
        k, v = tl.load(keys + at, mask=there, other=0.0), tl.load(values + at, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale
        scores = tl.where(mask[None, :], scores, float("-inf"))
        now = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - now[:, None])
        faded = tl.exp2(top - now)
        out = out * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=EXACT)
        total = total * faded + tl.sum(weights, 1)
        top = now
    return top, total, out


@triton.jit(do_not_specialize_on_alignment=["own_pages", "held", "write_at", "prompt_pages", "prompt_held"])
def _paged(q, k, v, keys, values, page, own_pages, own_levels, held, write_at,
           prompt_pages, prompt_levels, prompt_held, out, levels, q_row, k_row, v_row, scale,
           H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
           SPLITS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Attend to part of the keys of a row and head; the first part writes and reads the new key.

    Tables lie one behind the other in one tensor, aligned by chance: each new case would be compiled while decoding.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, dims = tl.arange(0, GP), tl.arange(0, DP)
    inside = (group < G)[:, None] & (dims < D)[None, :]
    query = tl.load(q + row * q_row + (head * G + group)[:, None] * D + dims[None, :], mask=inside, other=0.0)
    before, own = tl.load(prompt_held + row).to(tl.int32), tl.load(held + row).to(tl.int32)
    share = tl.cdiv(tl.cdiv(before + own, SPLITS), BLOCK) * BLOCK
    low, high = part * share, tl.minimum((part + 1) * share, before + own)
    top = tl.full([GP], float("-inf"), tl.float32)
    total, found = tl.zeros([GP], tl.float32), tl.zeros([GP, DP], tl.float32)
    if part == 0:
        new_k = tl.load(k + row * k_row + head * D + dims, mask=dims < D, other=0.0)
        new_v = tl.load(v + row * v_row + head * D + dims, mask=dims < D, other=0.0)
        at = (tl.load(write_at + row).to(tl.int64) * H + head) * D + dims
        tl.store(keys + at, new_k, mask=dims < D)
        tl.store(values + at, new_v, mask=dims < D)
        top = tl.sum(query.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
        total, found = total + 1.0, found + new_v.to(tl.float32)[None, :]
    top, total, found = _attend(
        query, keys, values, prompt_pages + row * prompt_levels, page,
        low, tl.minimum(high, before), head, top, total, found, scale, H, D, DP, BLOCK, EXACT,
    )  # fmt: skip
    top, total, found = _attend(
        query, keys, values, own_pages + row * own_levels, page,
        tl.maximum(low - before, 0), high - before, head, top, total, found, scale, H, D, DP, BLOCK, EXACT,
    )  # fmt: skip
    if SPLITS == 1:
        at = out + (row * H * G + head * G + group)[:, None] * D + dims[None, :]
        tl.store(at, (found / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        place = (row * H * G + head * G + group) * SPLITS + part
        total = tl.maximum(total, 1e-30)  # 0 without keys, where `top` is -inf
        tl.store(levels + place, top + tl.log2(total), mask=group < G)
        tl.store(out + place[:, None] * D + dims[None, :], found / total[:, None], mask=inside)


@triton.jit
def _join(parts, levels, out, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr):
    """Weight the parts of one row and query head by their shares of the softmax."""
    place, dims, part = tl.program_id(0), tl.arange(0, DP), tl.arange(0, SPLITS)
    level = tl.load(levels + place * SPLITS + part)
    share = tl.exp2(level - tl.max(level, 0))
    some = tl.load(parts + (place * SPLITS + part)[:, None] * D + dims[None, :], mask=(dims < D)[None, :], other=0.0)
    joined = tl.sum(some * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + place * D + dims, joined.to(out.dtype.element_ty), mask=dims < D)


def launch(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, page: int,
    own: Tensor, held: Tensor, write_at: Tensor, prompt: Tensor, seen: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Compute `attention.triton_attention`; a row's keys are split between programs until there are about PROGRAMS."""
    (rows, queries, dim), heads = q.shape, k.shape[1]
    q, k, v = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (q, k, v))
    splits = max(1, min(8, triton.next_power_of_2(-(-PROGRAMS // max(1, rows * heads)))))
    out = torch.empty(rows, queries, dim, dtype=q.dtype, device=q.device)
    parts = out if splits == 1 else out.new_empty(rows, queries, splits, dim, dtype=torch.float32)
    levels = parts.new_empty(rows, queries, splits, dtype=torch.float32)
    group, wide = queries // heads, max(16, triton.next_power_of_2(dim))
    _paged[rows, heads, splits](
        q, k, v, keys, values, page, own, own.shape[1], held, write_at, prompt, prompt.shape[1], seen, parts, levels,
        q.stride(0), k.stride(0), v.stride(0), scale * 1.4426950408889634,
        H=heads, G=group, GP=max(16, triton.next_power_of_2(group)), D=dim, DP=wide, BLOCK=BLOCK, SPLITS=splits,
        EXACT="ieee" if q.dtype == torch.float32 else "tf32", num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if splits > 1:
        _join[(rows * queries,)](parts, levels, out, D=dim, DP=wide, SPLITS=splits, num_warps=1)
    return out
