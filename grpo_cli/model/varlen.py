"""Attention over an unpadded run by PyTorch's flash kernels: on a GPU one or two calls for any number of sequences.

In the first call each span attends to itself causally. The second is for branches and their trunk: all branches of a
tree are one sequence of queries, so that the trunk's keys are read once; the two are merged by their log-sum-exps.
The backward kernel is given the merged output and log-sum-exp: probabilities are exp(score - log-sum-exp), so each call
gives the gradients of its own keys (as in ring attention, arXiv 2310.01889).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

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
    sizes: tuple[tuple[int, int], ...]  # on the host: how many queries and keys each has

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], causal: bool, device: torch.device) -> Spans:
        q, k = send(device, *(np.array([0, *accumulate(sizes)]) for sizes in (queries, keys)))
        return cls(q.int(), k.int(), max(queries), max(keys), causal, tuple(zip(queries, keys, strict=True)))


@dataclass(frozen=True)
class Trunks:
    """Where in the run all branches' tokens are and the trunks that they see, and which sees which."""

    branches: Int[Tensor, "M"] | slice
    trunks: Int[Tensor, "P"] | slice
    spans: Spans


class Kernel(ABC):
    """PyTorch's flash attention, or an equivalent. HG query heads share H key heads; log-sum-exps are float32 and
    ordered by head; further outputs of forward are passed to backward."""

    @abstractmethod
    def takes(self, q: Tensor) -> bool:
        """Whether it computes on queries of this type, shape and device."""

    @abstractmethod
    def forward(
        self, q: Float[Tensor, "N HG D"], k: Float[Tensor, "M H D"], v: Float[Tensor, "M H D"], at: Spans, scale: float
    ) -> tuple[Float[Tensor, "N HG D"], Float[Tensor, "HG N"], tuple[Tensor, ...]]: ...

    @abstractmethod
    def backward(
        self, grad: Float[Tensor, "N HG D"], qkv: tuple[Tensor, ...], out: Tensor, lse: Tensor, at: Spans, scale: float,
        besides: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip

    def part_forward(
        self, part: Part, scale: float, runs: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Of queries, keys and values: output, log-sum-exps, and what the kernel gives besides."""
        q, k, v = runs
        out, lse, besides = self.forward(q, k, v, part.own, scale)
        if part.trunks is None:
            return out, lse, besides
        at, of = part.trunks.branches, part.trunks.trunks
        above, lse_above, more = self.forward(q[at], k[of], v[of], part.trunks.spans, scale)
        lse_own = lse[:, at]
        share = torch.sigmoid(lse_above - lse_own).t().unsqueeze(-1)
        out[at] = out[at].float().lerp_(above.float(), share).to(out.dtype)
        lse[:, at] = torch.logaddexp(lse_own, lse_above)
        return out, lse, (*besides, *more)

    def part_backward(
        self, part: Part, scale: float, runs: Sequence[Tensor], lse: Tensor, besides: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the gradient, queries, keys, values and outputs."""
        trunks, half = part.trunks, len(besides) // (1 if part.trunks is None else 2)
        grad, q, k, v, out = (runs[0].contiguous(), *runs[1:])
        dq, dk, dv = self.backward(grad, (q, k, v), out, lse, part.own, scale, besides[:half])
        if trunks is not None:
            at, of = trunks.branches, trunks.trunks
            qkv, more = (q[at], k[of], v[of]), besides[half:]
            # Kernels of a GPU read log-sum-exps as if they were contiguous, which those of a slice are not.
            found = self.backward(grad[at], qkv, out[at], lse[:, at].contiguous(), trunks.spans, scale, more)
            for whole, place, one in zip((dq, dk, dv), (at, of, of), found, strict=True):
                whole[place] += one
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


class Flash(Kernel):
    """PyTorch's own, for 16-bit types and head dimensions that are multiples of 8 up to 256."""

    def takes(self, q: Tensor) -> bool:
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


SHORT = 2**18  # queries times keys, up to which its backward pass is faster in float32 than in bfloat16


def is_short(at: Spans) -> bool:
    """Whether a backward pass on a processor converts to float32."""
    return at.most_queries * at.most_keys <= SHORT


class OnProcessor(Kernel):
    """PyTorch's own for a processor, span by span: it takes one sequence, and as many key heads as query heads. In
    bfloat16 its backward pass takes 4 to 8 times as long as in float32 where sequences are short."""

    def takes(self, q: Tensor) -> bool:
        return q.device.type == "cpu"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Spans, scale: float) -> tuple[Tensor, Tensor, Any]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        parts = zip(_rows(q, at, False), _rows(k, at, True), _rows(v, at, True), strict=True)
        found = [_FORWARD(*part, 0.0, at.causal, scale=scale) for part in parts]
        outs, lses = zip(*found, strict=True)
        return _run(outs), torch.cat(lses, dim=2)[0], ()

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], out: Tensor, lse: Tensor, at: Spans, scale: float,
        besides: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        grad, q, k, v, out = (x.float() if is_short(at) else x for x in (grad, *qkv, out))
        heads = k.shape[1]
        k, v = (x.repeat_interleave(q.shape[1] // heads, dim=1) for x in (k, v))
        lses = lse[None].split([queries for queries, _ in at.sizes], dim=2)
        rows = (_rows(x, at, of_keys) for x, of_keys in ((grad, False), (q, False), (k, True), (v, True), (out, False)))
        parts = zip(*rows, lses, strict=True)
        found = [_BACKWARD(*part, 0.0, at.causal, scale=scale) for part in parts]
        dq, dk, dv = map(_run, zip(*found, strict=True))
        dk, dv = (x.unflatten(1, (heads, -1)).sum(dim=2) for x in (dk, dv))
        return dq, dk, dv


_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _rows(x: Tensor, at: Spans, of_keys: bool) -> tuple[Tensor, ...]:
    """The run's spans as batches of one, `1 H T D`."""
    return x.transpose(0, 1)[None].split([sizes[of_keys] for sizes in at.sizes], dim=2)


def _run(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat([x[0].transpose(0, 1) for x in rows])  # the kernel's results lie so in memory


@dataclass(frozen=True)
class Part:
    """Some trees of a run that are computed together, from `start` on: the spans that attend to themselves, and what
    branches see of their trunks. A processor takes one tree at a time, whose intermediates stay in its cache."""

    start: int
    tokens: int
    own: Spans
    trunks: Trunks | None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], scale: float, kernel: Kernel
    ) -> Tensor:
        found = [kernel.part_forward(part, scale, _within(part, q, k, v)) for part in parts]
        outs, lses, besides = zip(*found, strict=True)
        out, lse = _joined(outs, 0), _joined(lses, 1)
        ctx.asked, ctx.counts = (parts, scale, kernel), [len(some) for some in besides]
        ctx.save_for_backward(q, k, v, out, lse, *(one for some in besides for one in some))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (parts, scale, kernel), (q, k, v, out, lse, *besides) = ctx.asked, ctx.saved_tensors
        left, found = iter(besides), []
        for part, count in zip(parts, ctx.counts, strict=True):
            of, one = _within(part, grad, q, k, v, out), lse.narrow(1, part.start, part.tokens)
            found.append(kernel.part_backward(part, scale, of, one, tuple(islice(left, count))))
        return *(_joined(grads, 0) for grads in zip(*found, strict=True)), None, None, None


def _within(part: Part, *runs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.narrow(0, part.start, part.tokens) for x in runs)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim)


def attention(
    q: Float[Tensor, "N HG D"],
    k: Float[Tensor, "N H D"],
    v: Float[Tensor, "N H D"],
    parts: Sequence[Part],
    scale: float,
    kernel: Kernel,
) -> Float[Tensor, "N HG D"]:
    """Each token attends to its own span, causally, and to the trunk of its branch."""
    found: Tensor = _Attention.apply(q, k, v, parts, scale, kernel)
    return found
