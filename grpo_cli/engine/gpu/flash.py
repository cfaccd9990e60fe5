"""Attention of one decode step by PyTorch's FlashAttention: no scores in memory, and each row costs only its own
length.
Two calls have pages as their sequences: one over prompts' pages, queried by the rows that share them, and one over
rows' own. The queries that share a key head are queries of one head to the kernel, which would else copy queries and
results to the same end. Results of several pages are joined by their log-sum-exps, in float32. Lengths stay on the
device, so that a step's shape depends only on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_cli.engine.kv.cache import KvArena
from grpo_cli.engine.kv.rows import Rows, Watch
from grpo_cli.engine.kv.tiles import Runs

# Outputs [A, G, H, D] and log-sum-exps [A, G, H] of a call's queries; the indices of each row's, and a mask where a row
# has none [R, K].
Part = tuple[Tensor, Tensor, Tensor, Tensor]
Join = Callable[[Sequence[Part]], Tensor]

# The public function (`torch.nn.attention.varlen`) takes no lengths before PyTorch 2.12.
OPERATION = "_flash_attention_forward"


def reason_against(device: torch.device, dtype: torch.dtype, dim: int) -> str:
    """Why steps cannot use it; empty if they can."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it multiplies in 16 bits, and rollouts are made in {str(dtype).removeprefix('torch.')}"
    if dim % 8 or dim > 256:
        return f"its heads have a multiple of 8 and at most 256 numbers, and the model's have {dim}"
    operation = getattr(torch.ops.aten, OPERATION, None)
    known = () if operation is None else (argument.name for argument in operation.default._schema.arguments)
    if torch.version.hip or "seqused_k" not in known or not torch.backends.cuda.is_flash_attention_available():
        return f"PyTorch {torch.__version__} has none that takes lengths"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return f"it needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    return ""


def least_page(group: int) -> int:
    """The least tokens of a page that justify a query, with `group` queries per key-value head.

    A query is copied, and its result written and read again: 2 * group / tokens of the bytes of the page's keys and
    values, here at most 1/16. Half of each row's last page is empty, so larger pages would cost rows. The kernels read
    128 keys at a time.
    """
    return max(128, 32 * group)


def _forward(*operands: Any, **words: Any) -> Sequence[Tensor]:
    return torch.ops.aten._flash_attention_forward(*operands, **words)


def join(parts: Sequence[Part]) -> Float[Tensor, "R HGD"]:
    """Each row's results, weighted by their share of its softmax.

    For a sequence without keys the operation returns +inf as log-sum-exp, and leaves the results of unused queries
    uninitialised: neither counts. A row without results gets 0.
    """
    if all(at.shape[1] == 1 for _, _, at, _ in parts):  # a compiler makes one kernel of it
        outs = [out[at[:, 0]] for out, _, at, _ in parts]
        levels = [_level(logsumexp[at[:, 0]], missing) for _, logsumexp, at, missing in parts]
        most = reduce(torch.maximum, levels).clamp(min=torch.finfo(levels[0].dtype).min)
        shares = [(level - most).exp()[..., None] for level in levels]
        whole = reduce(torch.add, shares).clamp(min=torch.finfo(levels[0].dtype).tiny)
        pieces = [torch.where(share > 0, out, 0.0) * (share / whole) for share, out in zip(shares, outs, strict=True)]
        joined = reduce(torch.add, pieces)
    else:
        level = torch.cat([_level(logsumexp[at], missing[..., None]) for _, logsumexp, at, missing in parts], dim=1)
        heard = torch.cat([out[at] for out, _, at, _ in parts], dim=1)
        share = (level - level.amax(1, keepdim=True).clamp(min=torch.finfo(level.dtype).min)).exp()
        share = (share / share.sum(1, keepdim=True).clamp(min=torch.finfo(level.dtype).tiny))[..., None]
        joined = (torch.where(share > 0, heard, 0.0) * share).sum(1)
    return joined.to(parts[0][0].dtype).transpose(1, 2).flatten(1)


def _level(logsumexp: Float[Tensor, "... G H"], missing: Bool[Tensor, "... 1"]) -> Float[Tensor, "... G H"]:
    """What weighs nothing is -inf."""
    found = logsumexp.masked_fill(missing[..., None], -torch.inf)
    return found.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


@dataclass(frozen=True)
class _Call:
    """A call over prompts' pages or rows' own: its queries, and how many keys of each page count."""

    runs: Runs
    used: Int[Tensor, "N"]
    starts: Int[Tensor, "N+1"]  # of each page's queries, G for each that is asked
    keys: list[Tensor]
    values: list[Tensor]
    tokens: int  # of a page
    at: Int[Tensor, "R K"]
    missing: Bool[Tensor, "R K"]

    @classmethod
    def of(cls, runs: Runs, group: int, used: Tensor, kv: KvArena, prompts: bool, rows: int) -> _Call:
        """`rows` more rows after those of `runs` query nothing. `group`: of queries per key head."""
        nobody = len(runs.asks)
        of_row = F.pad(runs.of_row, (0, 0, 0, rows), value=nobody) if rows else runs.of_row
        tokens = (kv.prompts if prompts else kv.rows).tokens
        places = of_row.clamp(max=nobody - 1), of_row >= nobody
        return cls(runs, used, runs.starts * group, *kv.by_token(prompts), tokens, *places)

    def __call__(self, layer: int, q: Float[Tensor, "R G H D"], scale: float) -> Part:
        runs = self.runs
        asked = q[: len(self.used)] if runs.in_order else q.index_select(0, runs.asks)
        (_, group, heads, _), keys, values = asked.shape, self.keys[layer], self.values[layer]
        sizes = runs.most * group, self.tokens
        given = asked.flatten(0, 1), keys, values, self.starts, runs.keys, *sizes, 0.0, False, False
        out, logsumexp, *_ = _forward(*given, scale=scale, seqused_k=self.used)
        return out.view(asked.shape), logsumexp.t().view(-1, group, heads), self.at, self.missing


class FlashAttention:
    """As `StepAttention`, for pages laid out `by_token`. It returns `rows_to` rows, those beyond `rows` being 0; a
    watch gets no weights."""

    def __init__(
        self, rows: Rows, kv: KvArena, group: int, scale: float, watch: Watch, rows_to: int, joined: Join
    ) -> None:
        own, prompt = rows.own, rows.prompt
        assert isinstance(own, Runs) and isinstance(prompt, Runs), "the layout is by token"
        self._kv, self._watch, self._scale, self._join = kv, watch, scale, joined
        self._count, tokens = rows.tokens.shape[0], kv.rows.tokens
        self._write_at = rows.write_to * tokens + rows.lengths.remainder(tokens)
        used = (rows.lengths + 1).index_select(0, own.asks).sub_(own.first).clamp_(0, tokens).int()
        more = rows_to - self._count
        self._calls = [_Call.of(own, group, used, kv, False, more)]
        if prompt.of_row.shape[1]:
            assert prompt.held is not None, "a prompt's page has a length"
            self._calls.insert(0, _Call.of(prompt, group, prompt.held, kv, True, more))
        if any(len(call.runs.asks) == 1 for call in self._calls):
            self._join = join  # for size 1 it would be compiled again
        watch.prepare(rows)

    def __call__(
        self, layer: int, q: Float[Tensor, "R HG D"], k: Float[Tensor, "R H D"], v: Float[Tensor, "R H D"]
    ) -> Float[Tensor, "R HGD"]:
        count = self._count
        self._kv.write_tokens(layer, self._write_at, k[:count], v[:count])
        self._watch.see(layer, q[:count], None)
        by_group = q.unflatten(1, (k.shape[1], -1)).transpose(1, 2).contiguous()
        return self._join([call(layer, by_group, self._scale) for call in self._calls])
