"""Attention of one decode step over page tables: one Triton kernel on a GPU, plain PyTorch elsewhere.

Each row reads its prompt's pages and then its own by its own length, which stays on the device: a step's shape depends
only on the number of rows. Pages are laid out by token, [tokens, heads, dim].
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.kv.cache import KvArena
from grpo_cli.engine.kv.rows import Rows, Watch
from grpo_cli.engine.kv.tiles import PageTable


def reason_against(device: torch.device, dim: int) -> str:
    """Return why the kernel cannot run there; empty if it can."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if dim > 256:
        return f"its heads have at most 256 numbers, and the model's have {dim}"
    if torch.version.hip or (torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)):
        return "it needs a GPU of compute capability 8.0"
    return "" if find_spec("triton") or not torch.cuda.is_available() else "Triton is not installed"


# Spelt out, since PyTorch reads no annotations of a function that checks its own (jaxtyping's hook).
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a3!) own_keys, Tensor(a4!) own_values, Tensor own_pages, SymInt own_page, "
    "Tensor held, Tensor write_at, Tensor prompt_keys, Tensor prompt_values, Tensor prompt_pages, SymInt prompt_page, "
    "Tensor prompt_held, float scale) -> Tensor"
)


@torch.library.custom_op("grpo_cli::paged_attention", mutates_args=("own_keys", "own_values"), schema=_SCHEMA)
def paged_attention(
    q: Tensor, k: Tensor, v: Tensor,
    own_keys: Tensor, own_values: Tensor, own_pages: Tensor, own_page: int, held: Tensor, write_at: Tensor,
    prompt_keys: Tensor, prompt_values: Tensor, prompt_pages: Tensor, prompt_page: int, prompt_held: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Compute each row's attention over its prompt's keys, its own, and its new one, which is written too.

    q is [R, HG, D], k and v [R, H, D]; keys and values [tokens, H, D]; pages [R, K] of `own_page` and `prompt_page`
    tokens; held, write_at and prompt_held [R]: keys of a row before the step, where its new one goes, keys of its
    prompt. Returns [R, HG, D].
    """
    rows, queries, dim = q.shape
    out = torch.empty_like(q)
    for row in range(rows):
        keys, values = [], []
        for pages, page, count, of_keys, of_values in (
            (prompt_pages, prompt_page, prompt_held, prompt_keys, prompt_values),
            (own_pages, own_page, held, own_keys, own_values),
        ):
            token = torch.arange(int(count[row]), device=q.device)
            at = pages[row][token // page] * page + token % page
            keys.append(of_keys[at])
            values.append(of_values[at])
        heads = k.shape[1]
        mine = q[row].view(heads, queries // heads, dim).float()
        all_keys, all_values = (torch.cat([*some, new[row][None]]).float() for some, new in ((keys, k), (values, v)))
        weights = (torch.einsum("hgd,nhd->hgn", mine, all_keys) * scale).softmax(-1)
        out[row] = torch.einsum("hgn,nhd->hgd", weights, all_values).reshape(queries, dim).to(q.dtype)
    own_keys.index_copy_(0, write_at, k.to(own_keys.dtype))
    own_values.index_copy_(0, write_at, v.to(own_values.dtype))
    return out


@paged_attention.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q)


@paged_attention.register_kernel("cuda")
def _(*operands: Any) -> Tensor:
    from grpo_cli.engine.gpu.paged_kernel import launch

    return launch(*operands)


class PagedAttention:
    """A step's attention over pages laid out by token; a watch gets no weights."""

    def __init__(self, rows: Rows, kv: KvArena, scale: float, watch: Watch) -> None:
        own, prompt = rows.own, rows.prompt
        assert isinstance(own, PageTable) and isinstance(prompt, PageTable), "the layout is by token"
        self._kv, self._watch, self._scale, self._count = kv, watch, scale, rows.tokens.shape[0]
        page = kv.rows.tokens
        self._own = own.of_row, page, rows.lengths, rows.write_to * page + rows.lengths.remainder(page)
        self._prompt = prompt.of_row, kv.prompts.tokens, prompt.held
        watch.prepare(rows)

    def __call__(
        self, layer: int, q: Float[Tensor, "R HG D"], k: Float[Tensor, "R H D"], v: Float[Tensor, "R H D"]
    ) -> Float[Tensor, "R HGD"]:
        count, dtype = self._count, self._kv.layout.dtype
        q, k, v = (x[:count].to(dtype) for x in (q, k, v))
        self._watch.see(layer, q, None)
        own, prompt = ([some[layer] for some in self._kv.by_token(prompts)] for prompts in (False, True))
        return paged_attention(q, k, v, *own, *self._own, *prompt, *self._prompt, self._scale).flatten(1)
