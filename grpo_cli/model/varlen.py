"""Attention over an unpadded run by PyTorch's flash kernel, in one or two calls for any number of sequences.

In the first call each span attends to itself causally. The second is for branches and their trunk: all branches of a
tree are one sequence of queries, so that the trunk's keys are read once; the two are merged by their log-sum-exps.
The backward kernel is given the merged output and log-sum-exp: probabilities are exp(score - log-sum-exp), so each call
gives the gradients of its own keys (as in ring attention, arXiv 2310.01889).
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
    """Consecutive sequences of queries and of the keys that each sees: their starts and the last end (int32), and the
    longest lengths. `causal`: each token sees only itself and those before it."""

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
    """Positions in the run of all branches' tokens and of the trunks that they see, and which sees which."""

    branches: Int[Tensor, "M"]
    trunks: Int[Tensor, "P"]
    spans: Spans


@runtime_checkable
class Kernel(Protocol):
    """PyTorch's flash attention, or an equivalent. HG query heads share H key heads; log-sum-exps are float32 and
    ordered by head; further outputs of forward are passed to backward."""

    def forward(
        self, q: Float[Tensor, "N HG D"], k: Float[Tensor, "M H D"], v: Float[Tensor, "M H D"], at: Spans, scale: float
    ) -> tuple[Float[Tensor, "N HG D"], Float[Tensor, "HG N"], tuple[Tensor, ...]]: ...

    def backward(
        self, grad: Float[Tensor, "N HG D"], qkv: tuple[Tensor, ...], out: Tensor, lse: Tensor, at: Spans, scale: float,
        besides: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


class Flash:
    """PyTorch's own, for 16-bit types and head dimensions that are multiples of 8 up to 256."""

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
    """Each token attends to its own span, causally, and to the trunk of its branch."""
    found: Tensor = _Attention.apply(q, k, v, own, trunks, scale, kernel)
    return found
