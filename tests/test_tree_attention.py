"""Attention of packed trees is its definition, with its gradients; bits depend on no thread and no other tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import require_c
from torch import Tensor

from grpo_cli.model import flash
from grpo_cli.native import ops
from grpo_cli.native.ops import Trees, flat, reference, tree_attention
from grpo_cli.support.threads import computing_with

# Of the largest number: what is lost by computing in another order, and by rounding once to bfloat16.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
UNEVEN = ((40, 30, 7), (33, 64), (5,))


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room of its threads holds NaN before it is used, none of which may reach a result."""
    require_c("tree")
    room = ops._scratch

    def dirty(*shapes: Any) -> Any:
        (scratch, *others) = room(*shapes)
        return scratch.fill_(torch.nan), *others

    monkeypatch.setattr(ops, "_scratch", dirty)


def runs_of(trees: Trees, heads: int, group: int, dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys, values and a gradient."""
    generator, tokens = torch.Generator().manual_seed(0), sum(map(sum, trees))
    return [torch.randn(tokens, count * heads, dim, generator=generator).to(dtype) for count in (group, 1, 1, group)]


def in_c(trees: Trees, runs: Sequence[Tensor], scale: float) -> list[Tensor]:
    """The output, and gradients of queries, keys and values."""
    inputs = [x.clone().requires_grad_() for x in runs[:3]]
    out = tree_attention(*inputs, flat(trees), scale)[0]
    return [out.detach(), *torch.autograd.grad(out, inputs, runs[3])]


def by_hand(trees: Trees, runs: Sequence[Tensor], scale: float) -> list[Tensor]:
    """The same in float64: each branch as a sequence of its own, behind a trunk of its own."""
    q, k, v = (x.double().requires_grad_() for x in runs[:3])
    outs, begin = [], 0
    for trunk, *branches in trees:
        first, start = slice(begin, begin + trunk), begin + trunk
        outs.append(causal(q[first], k[first], v[first], 0, scale))
        for size in branches:
            own = slice(start, start + size)
            keys, values = (torch.cat([x[first], x[own]]) for x in (k, v))
            outs.append(causal(q[own], keys, values, trunk, scale))
            start += size
        begin = start
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), runs[3].double())]


def causal(q: Tensor, k: Tensor, v: Tensor, before: int, scale: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    later = torch.arange(len(k)) > before + torch.arange(len(q))[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def close(found: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(float((a.double() - b).abs().max()) <= CLOSE[dtype] * max(1.0, float(b.abs().max())) for a, b in pairs)


@settings(max_examples=25, deadline=None)
@given(
    trees=st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=4), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([1, 8, 24, 64, 80, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_c_and_the_reference_are_the_definition(
    trees: Trees, heads: int, group: int, dim: int, dtype: torch.dtype
) -> None:
    runs, scale = runs_of(trees, heads, group, dim, dtype), dim**-0.5
    wanted = by_hand(trees, runs, scale)
    assert close(in_c(trees, runs, scale), wanted, dtype)
    inputs = [x.clone().requires_grad_() for x in runs[:3]]
    out = reference(*inputs, trees, scale)
    assert close([out.detach(), *torch.autograd.grad(out, inputs, runs[3])], wanted, dtype)


def written_out(q: Tensor, k: Tensor, at: flash.Spans, scale: float) -> Iterator[tuple[slice, slice, Tensor]]:
    """The scores of each span, as the flash kernel takes them."""
    ends = list(zip(at.queries.tolist(), at.keys.tolist(), strict=True))
    for (q0, k0), (q1, k1) in zip(ends, ends[1:], strict=False):
        assert 0 < q1 - q0 <= at.most_queries and 0 < k1 - k0 <= at.most_keys
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1].repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + k1 - k0 - q1 + q0)
        yield slice(q0, q1), slice(k0, k1), scores.masked_fill(later, -torch.inf) if at.causal else scores


def kernel_forward(q: Tensor, k: Tensor, v: Tensor, at: flash.Spans, scale: float) -> Any:
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], len(q))
    for qs, ks, scores in written_out(q, k, at, scale):
        lse[:, qs] = scores.logsumexp(-1)
        out[qs] = mixed(scores.softmax(-1), v[ks])
    return out, lse


def mixed(shares: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("hqk,khd->qhd", shares, v.repeat_interleave(len(shares) // v.shape[1], 1))


def kernel_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: flash.Spans, scale: float
) -> Any:
    """By autograd, with the sums of exponentials of all calls as constants, whose gradient is that of `out`'s share."""
    assert lse.is_contiguous(), "kernels read it as if it were"
    q, k, v = inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    total = torch.zeros(())
    for qs, ks, scores in written_out(q, k, at, scale):
        shares, of_sums = (scores - lse[:, qs, None]).exp(), (grad[qs] * out[qs]).sum(-1).t()
        total = total + (grad[qs] * mixed(shares, v[ks])).sum() - (of_sums * shares.sum(-1)).sum()
    return torch.autograd.grad(total, inputs)


@pytest.mark.parametrize("trees", [UNEVEN, ((7,), (3,)), ((6, 14, 10),)], ids=["trees", "sequences", "one tree"])
def test_two_calls_of_a_flash_kernel_are_merged_to_the_definition(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "_forward", kernel_forward)
    monkeypatch.setattr(flash, "_backward", kernel_backward)
    q, k, v, grad = runs = runs_of(trees, 2, 3, 16)
    out, logs = flash.forward(q, k, v, flat(trees), 0.25)
    found = [out, *flash.backward(grad, q, k, v, out, logs, flat(trees), 0.25)]
    assert close(found, by_hand(trees, runs, 0.25), torch.float32)


def test_long_sequences_and_large_scores_are_right_too() -> None:
    """Scores of some hundreds, whose exponentials are no numbers."""
    trees = ((900, 300, 5), (1300,))
    runs = runs_of(trees, 1, 2, 64)
    assert close(in_c(trees, runs, 0.125), by_hand(trees, runs, 0.125), torch.float32)
    runs[0] *= 30
    found, wanted = in_c(trees, runs, 1.0), by_hand(trees, runs, 1.0)
    assert float(runs[0].abs().max()) > 100 and all(bool(x.isfinite().all()) for x in found)
    assert float((found[0].double() - wanted[0]).abs().max()) < 1e-3


def test_no_bit_depends_on_threads_or_on_other_trees() -> None:
    trees = UNEVEN
    runs = runs_of(trees, 3, 3, 64)
    together = in_c(trees, runs, 0.125)
    for threads in (1, 2, 3, 8):
        with computing_with(threads):
            assert all(map(torch.equal, in_c(trees, runs, 0.125), together))
    first = [x[:77] for x in runs]
    assert all(torch.equal(a, b[:77]) for a, b in zip(in_c(trees[:1], first, 0.125), together, strict=True))


def test_what_is_not_a_number_stays_so() -> None:
    runs = runs_of([(3, 2, 2)], 1, 1, 8)
    runs[0][4, 0, 0] = torch.nan  # a query of the first branch
    out, dq, dk, _ = in_c([(3, 2, 2)], runs, 1.0)
    hurt = out.isnan().any(-1).flatten().tolist()
    assert hurt == [False, False, False, False, True, False, False]
    assert bool(dq[4].isnan().any()) and bool(dk[0].isnan().any()) and not bool(dk[5:].isnan().any())
