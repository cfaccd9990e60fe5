"""Attention of a run without padding by PyTorch's flash kernel, in one or two calls whatever the run is made of.

In the first call each span sees itself causally. What branches see of their trunk is a second one, in which all
branches of a tree are one sequence of queries, so that the trunk's keys are there once; the two are joined by their
log-sum-exps. Backward, the kernel is given the joined output and log-sum-exp: probabilities are
exp(score - log-sum-exp), so each call gives the gradients of its own keys (as in ring attention, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.model.transfer import send


@dataclass(frozen=True)
class Spans:
    """Sequences of queries and those of keys that each sees, one after the other: where they begin and the last ends,
    int32, and how long the longest are. `causal`: each token sees those before it and itself."""

    queries: Int[Tensor, "Ends"]
    keys: Int[Tensor, "Ends"]
    most_queries: int
    most_keys: int
    causal: bool

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], causal: bool, device: torch.device) -> Spans:
        q, k = send(device, *(np.array([0, *accumulate(sizes)]) for sizes in (queries, keys)))
        return cls(q.int(), k.int(), max(queries), max(keys), causal)


@dataclass(frozen=True)
class Trunks:
    """Places in the run of all branches' tokens and of the trunks that they see, and which sees which."""

    branches: Int[Tensor, "M"]
    trunks: Int[Tensor, "P"]
    spans: Spans


@runtime_checkable
class Kernel(Protocol):
    """PyTorch's flash attention, or what computes the same. HG query heads share H key heads; log-sum-exps are float32
    and lie by head; what it says besides goes back to it."""

    def forward(
        self, q: Float[Tensor, "N HG D"], k: Float[Tensor, "M H D"], v: Float[Tensor, "M H D"], at: Spans, scale: float
    ) -> tuple[Float[Tensor, "N HG D"], Float[Tensor, "HG N"], tuple[Tensor, ...]]: ...

    def backward(
        self, grad: Float[Tensor, "N HG D"], qkv: tuple[Tensor, ...], out: Tensor, lse: Tensor, at: Spans, scale: float,
        besides: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


class Flash:
    """PyTorch's own, which wants 16 bits and a head dimension of at most 256, a multiple of 8."""

    @staticmethod
    def takes(q: Tensor) -> bool:
        halves = (torch.bfloat16, torch.float16)
        return q.device.type == "cuda" and q.dtype in halves and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Spans, scale: float) -> tuple[Tensor, Tensor, Any]:
        asked = (at.queries, at.keys, at.most_queries, at.most_keys, 0.0, at.causal)
        out, lse, *besides, _ = torch.ops.aten._flash_attention_forward(q, k, v, *asked, False, scale=scale)
        return out, lse, tuple(besides)

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], out: Tensor, lse: Tensor, at: Spans, scale: float,
        besides: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        asked = (at.queries, at.keys, at.most_queries, at.most_keys, 0.0, at.causal)
        q, k, v = qkv
        found = torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, *asked, *besides, scale=scale)
        return tuple(found)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, own: Spans, trunks: Trunks | None, scale: float, kernel: Kernel
    ) -> Tensor:
        out, lse, besides = kernel.forward(q, k, v, own, scale)
        ctx.asked, ctx.count = (own, trunks, scale, kernel), len(besides)
        if trunks is not None:
            at, of = trunks.branches, trunks.trunks
            seen = k.index_select(0, of), v.index_select(0, of)
            above, lse_above, more = kernel.forward(q.index_select(0, at), *seen, trunks.spans, scale)
            lse_own = lse.index_select(1, at)
            joined = torch.logaddexp(lse_own, lse_above)
            share, share_above = ((part - joined).exp().t().unsqueeze(-1) for part in (lse_own, lse_above))
            both = out.index_select(0, at) * share + above * share_above
            out.index_copy_(0, at, both.to(out.dtype))
            lse.index_copy_(1, at, joined)
            besides = (*besides, *more)
        ctx.save_for_backward(q, k, v, out, lse, *besides)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (own, trunks, scale, kernel), (q, k, v, out, lse, *besides) = ctx.asked, ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = kernel.backward(grad, (q, k, v), out, lse, own, scale, tuple(besides[: ctx.count]))
        if trunks is not None:
            at, of = trunks.branches, trunks.trunks
            of_branches, more = (x.index_select(0, at) for x in (grad, q, out)), tuple(besides[ctx.count :])
            grad_of, q_of, out_of = of_branches
            qkv = q_of, k.index_select(0, of), v.index_select(0, of)
            found = kernel.backward(grad_of, qkv, out_of, lse.index_select(1, at), trunks.spans, scale, more)
            for whole, place, part in zip((dq, dk, dv), (at, of, of), found, strict=True):
                whole.index_add_(0, place, part)
        return dq, dk, dv, None, None, None, None


def attention(
    q: Float[Tensor, "N HG D"],
    k: Float[Tensor, "N H D"],
    v: Float[Tensor, "N H D"],
    own: Spans,
    trunks: Trunks | None,
    scale: float,
    kernel: Kernel,
) -> Float[Tensor, "N HG D"]:
    """What each token of the run sees, of its own span and of the trunk above it."""
    found: Tensor = _Attention.apply(q, k, v, own, trunks, scale, kernel)
    return found
