"""Attention of one decode step over tables of blocks: each row sees its prompt's keys, its own, and its new one.

There are three backends: C (`native.py`), one kernel of a GPU (`gpu/paged.py`), and PyTorch's operations, which run
anywhere and return the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.kv.cache import BLOCK, PagedCache
from grpo_cli.engine.step.rows import Rows

# Of a layer's queries, keys and values: what its rows attend to, [R, HGD], and the weights if they are known.
Attention = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def reference(rows: Rows, cache: PagedCache, scale: float) -> Attention:
    """Attention in PyTorch's operations. Sums are made block by block, then in pairs, so that blocks which other rows
    have change no bit; scores are in float32 at least."""
    count, blocks = rows.own.shape[0], torch.cat([rows.prompt, rows.own], dim=1)
    place = torch.arange(BLOCK * blocks.shape[1], device=blocks.device)
    own = BLOCK * rows.prompt.shape[1]
    hidden = torch.where(place < own, place >= rows.seen[:, None], place - own > rows.held[:, None])
    hidden = hidden.view(count, 1, 1, -1)
    inside = rows.held.remainder(BLOCK)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = cache.keys[layer], cache.values[layer]
        keys[rows.write_to, :, inside], values[rows.write_to, :, inside] = k.to(keys.dtype), v.to(values.dtype)
        (_, heads, dim), exact = k.shape, torch.promote_types(keys.dtype, torch.float32)
        asked = q.to(keys.dtype).view(count, 1, heads, -1, dim).expand(-1, blocks.shape[1], -1, -1, -1)
        scores = (asked.to(exact) @ keys[blocks].to(exact).mT * scale).permute(0, 2, 3, 1, 4).flatten(3)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(keys.dtype)
        by_block = weights.unflatten(3, (-1, BLOCK)).permute(0, 3, 1, 2, 4)
        unseen = hidden.view(count, -1, 1, BLOCK, 1)
        parts = (by_block @ values[blocks].masked_fill(unseen, 0.0)).to(exact)
        of_prompt, mine = parts.split([rows.prompt.shape[1], rows.own.shape[1]], dim=1)
        out = _summed(mine) + (_summed(of_prompt) if of_prompt.shape[1] else 0.0)
        return out.flatten(1).to(keys.dtype), weights

    return attend


def _summed(x: Float[Tensor, "R K *n"]) -> Tensor:
    """Sum in pairs over K, so that further blocks only add zeros and no bit depends on K."""
    while (blocks := x.shape[1]) > 1:
        even = x[:, : blocks // 2 * 2 : 2] + x[:, 1::2]
        x = torch.cat([even, x[:, -1:]], dim=1) if blocks % 2 else even
    return x[:, 0]
