"""Attention of trees by PyTorch's flash kernels on a GPU: one or two calls for any number of sequences.

In the first call each span attends to itself causally. The second is for branches and their trunk: all branches of a
tree are one sequence of queries, so that the trunk's keys are read once; the two are merged by their log-sum-exps.
The backward kernel takes the merged output and log-sum-exp: probabilities are exp(score - log-sum-exp), so each call
gives the gradients of its own keys (as in ring attention, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_cli.model.transfer import send
from grpo_cli.native.ops import tree_attention, tree_attention_backward, unflat


class Spans(NamedTuple):
    """Consecutive sequences of queries and of the keys that each sees, as the kernels take them: their starts and the
    last end (int32), and the longest lengths. `causal`: each token sees only itself and those before it."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    dropout: float
    causal: bool

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], causal: bool, device: torch.device) -> Spans:
        q, k = send(device, *(np.array([0, *accumulate(sizes)]) for sizes in (queries, keys)))
        return cls(q.int(), k.int(), max(queries), max(keys), 0.0, causal)


@lru_cache(maxsize=1)  # every layer of a pass has the same
def layout(numbers: tuple[int, ...], device: torch.device) -> tuple[Spans, tuple[Tensor, Tensor, Spans] | None]:
    """Return the spans that attend to themselves; and, if there are branches, the places of their tokens, those of
    their trunks, and which sees which."""
    trees = unflat(numbers)
    sizes = [size for tree in trees for size in tree]
    own = Spans.of(sizes, sizes, True, device)
    starts = accumulate(map(sum, trees), initial=0)
    split = [(tree, start) for tree, start in zip(trees, starts, strict=False) if len(tree) > 1]
    if not split:
        return own, None
    branches = np.concatenate([np.arange(start + tree[0], start + sum(tree)) for tree, start in split])
    trunks = np.concatenate([np.arange(start, start + tree[0]) for tree, start in split])
    spans = Spans.of([sum(tree[1:]) for tree, _ in split], [tree[0] for tree, _ in split], False, device)
    at, seen = send(device, branches, trunks)
    return own, (at, seen, spans)


def serves(q: Tensor) -> bool:
    """True if the kernels compute on queries of this type, shape and device."""
    halves = (torch.bfloat16, torch.float16)
    fits = q.device.type == "cuda" and q.dtype in halves and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return fits and (not torch.cuda.is_available() or torch.cuda.get_device_capability(q.device) >= (8, 0))


@tree_attention.register_kernel("cuda")
def forward(q: Tensor, k: Tensor, v: Tensor, trees: list[int], scale: float) -> tuple[Tensor, Tensor]:
    own, above = layout(tuple(trees), q.device)
    out, lse = _forward(q, k, v, own, scale)
    if above is not None:
        at, seen, spans = above
        out_above, lse_above = _forward(q[at], k[seen], v[seen], spans, scale)
        lse_own = lse[:, at]
        share = torch.sigmoid(lse_above - lse_own).t().unsqueeze(-1)
        out[at] = out[at].float().lerp_(out_above.float(), share).to(out.dtype)
        lse[:, at] = torch.logaddexp(lse_own, lse_above)
    return out, lse


@tree_attention_backward.register_kernel("cuda")
def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, trees: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    own, above = layout(tuple(trees), q.device)
    grads = _backward(grad, q, k, v, out, logs, own, scale)
    if above is not None:
        at, seen, spans = above
        # The kernels read log-sum-exps as if they were contiguous, which those of a slice are not.
        some = grad[at], q[at], k[seen], v[seen], out[at], logs[:, at].contiguous()
        for whole, place, one in zip(grads, (at, seen, seen), _backward(*some, spans, scale), strict=True):
            whole[place] += one
    return grads


def _forward(q: Tensor, k: Tensor, v: Tensor, at: Spans, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *at, False, scale=scale)
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Spans, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # What the forward kernel returns beside: a random state, which is for dropout alone, and nothing.
    unread = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, *at, *unread, scale=scale)
    return dq, dk, dv
