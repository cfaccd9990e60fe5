"""Attention of one decode step: every row sees its prompt, stored once for all its rows, and then its own response.

Scores are computed page by page in place, joined for one softmax, and split again for the values. So a group's prompt
keys are read once per step rather than once per rollout, no row pays for the length of another, and only queries,
scores and results are copied.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.engine.kv.cache import KvArena
from grpo_cli.engine.kv.rows import Rows, Watch
from grpo_cli.engine.kv.tiles import Pieces


class StepAttention:
    """Shared by all layers of a step: where to write, and what each row may attend to."""

    def __init__(self, rows: Rows, kv: KvArena, group: int, scale: float, watch: Watch) -> None:
        self._rows, self._kv, self._watch, self._group, self._scale = rows, kv, watch, group, scale
        self._count = rows.tokens.shape[0]
        heads, tokens = kv.layout.heads, kv.rows.tokens
        device, dtype = rows.lengths.device, kv.layout.dtype
        head = torch.arange(heads, device=device)
        at = (rows.write_to[:, None] * heads + head) * tokens + rows.lengths.remainder(tokens)[:, None]
        self._write_at = at.flatten()
        # Scores are float32 even if keys are not: rounding large scores would change the softmax.
        self._exact = torch.float32 if dtype == torch.bfloat16 else dtype
        assert isinstance(rows.own, Pieces) and isinstance(rows.prompt, Pieces), "the layout is not by token"
        asking = rows.own.rows
        seen = (rows.lengths + 1).index_select(0, asking.flatten()).view(asking.shape) - rows.own.first[:, None]
        own = (kv.row_keys, kv.row_values)
        self._sides = [_Side(rows.own, *own, rows.width, self._bias(seen, rows.width), self._shape())]
        if rows.prompt.of_row.shape[1]:
            assert rows.prompt.held is not None, "a prompt's page has a length"
            bias = self._bias(rows.prompt.held[:, None], kv.prompts.tokens)
            side = _Side(rows.prompt, kv.prompt_keys, kv.prompt_values, kv.prompts.tokens, bias, self._shape())
            self._sides.insert(0, side)
        watch.prepare(rows)

    def _shape(self) -> tuple[int, int, int]:
        return self._kv.layout.heads, self._group, self._kv.layout.dim

    def _bias(self, held: Int[Tensor, "N C"], width: int) -> Float[Tensor, "NH q n"]:
        """Added to the scores: 0 for the first `held` of `width` keys, -inf beyond; for each head and, where pages are
        queried by rows that see different keys (C > 1), each query."""
        (pages, columns), (heads, group, _) = held.shape, self._shape()
        beyond = torch.arange(width, device=held.device) >= held[..., None]
        bias = torch.zeros(beyond.shape, device=held.device, dtype=self._exact).masked_fill_(beyond, -torch.inf)
        every = bias[:, None, :, None].expand(-1, heads, -1, group if columns > 1 else 1, -1)
        return every.reshape(pages * heads, -1, width)

    def __call__(
        self, layer: int, q: Float[Tensor, "R HG D"], k: Float[Tensor, "R H D"], v: Float[Tensor, "R H D"]
    ) -> Float[Tensor, "R HGD"]:
        """Write this step's keys and values, and attend. H is key-value heads, G queries per key-value head."""
        heads, group, dim = self._shape()
        self._kv.write(layer, self._write_at, k.reshape(-1, dim), v.reshape(-1, dim))
        dtype = self._kv.layout.dtype
        asked = q.reshape(self._count, heads * group * dim).to(dtype)
        scores = [side.scores(layer, asked, self._scale) for side in self._sides]
        weights = torch.cat(scores, dim=-1).softmax(-1).to(dtype)
        del scores
        self._watch.see(layer, q, weights.view(self._count * heads, group, -1))
        parts = weights.split([side.width for side in self._sides], dim=-1)
        out = None
        for side, part in zip(self._sides, parts, strict=True):
            out = side.answers(layer, part, out)
        assert out is not None, "a row sees itself"
        return out.to(dtype)


class _Side:
    """Prompts' pages or rows' own: their keys and values by layer, and the mapping between rows and pages."""

    def __init__(
        self,
        pieces: Pieces,
        keys: list[Tensor],
        values: list[Tensor],
        tokens: int,
        bias: Float[Tensor, "NH q n"],
        shape: tuple[int, int, int],
    ) -> None:
        """`tokens`: how many are read of each page."""
        self._pieces, self._keys, self._values, self._bias, self._tokens = pieces, keys, values, bias, tokens
        self._heads, self._group, self._dim = shape
        (self._pages, self._columns), (self._rows, self._levels) = pieces.rows.shape, pieces.of_row.shape
        self._asking, self._of_row = pieces.rows.flatten(), pieces.of_row.flatten()
        self.width = self._levels * tokens  # of a row's scores

    def scores(self, layer: int, asked: Float[Tensor, "R HGD"], scale: float) -> Float[Tensor, "R H G n"]:
        """Each row's scores over its pages, -inf where it has none."""
        questions = self._by_page(asked, self._asking)
        by_piece = self._by_piece(_product(self._bias, questions, self._of(self._keys, layer), scale))
        if self._pieces.in_order:
            return by_piece.view(self._rows, self._heads, self._group, self._tokens)
        by_row = self._picked(by_piece, -torch.inf)
        by_row = by_row.view(self._rows, self._levels, self._heads, self._group, self._tokens)
        return by_row.permute(0, 2, 3, 1, 4).reshape(self._rows, self._heads, self._group, self.width)

    def answers(self, layer: int, weights: Float[Tensor, "R H G n"], before: Tensor | None) -> Float[Tensor, "R HGD"]:
        """Weighted values, summed page by page, then over pages, and added to `before`."""
        by_level = weights.unflatten(-1, (self._levels, self._tokens)).permute(0, 3, 1, 2, 4)
        questions = self._by_page(by_level.reshape(self._rows * self._levels, -1), self._pieces.cell)
        out = self._by_piece(torch.bmm(questions, self._of(self._values, layer)))
        if not self._pieces.in_order:
            # Lower precision is summed in float32.
            by_row = self._picked(out, 0.0).to(self._bias.dtype)
            out = _summed(by_row.view(self._rows, self._levels, -1))
        return out if before is None else before + out

    def _picked(self, x: Float[Tensor, "NC n"], nothing: float) -> Float[Tensor, "RK n"]:
        """Each row's pieces, with `nothing` where it has none."""
        if not self._pieces.whole:
            x = torch.cat([x, x.new_full((1, x.shape[1]), nothing)])
        return x.index_select(0, self._of_row)

    def _of(self, views: list[Tensor], layer: int) -> Float[Tensor, "NH n D"]:
        return views[layer][: self._pages].flatten(0, 1)[:, : self._tokens]

    def _by_page(self, x: Float[Tensor, "M HGn"], index: Int[Tensor, "NC"]) -> Float[Tensor, "NH CG n"]:
        """The rows of `x` for each piece (`index`), grouped by page."""
        if not self._pieces.in_order:
            x = x.index_select(0, index)
        size = x.shape[-1] // (self._heads * self._group)
        x = x.view(self._pages, self._columns, self._heads, self._group * size)
        return x.transpose(1, 2).reshape(self._pages * self._heads, self._columns * self._group, size)

    def _by_piece(self, x: Float[Tensor, "NH CG n"]) -> Float[Tensor, "NC HGn"]:
        """The inverse of `_by_page`."""
        x = x.view(self._pages, self._heads, self._columns, -1).transpose(1, 2)
        return x.reshape(self._pages * self._columns, -1)


def _product(
    bias: Float[Tensor, "B q n"], x: Float[Tensor, "B m D"], keys: Float[Tensor, "B n D"], scale: float
) -> Float[Tensor, "B m n"]:
    """x keys^T * scale + bias, in the bias's precision."""
    if bias.dtype == x.dtype:
        return torch.baddbmm(bias, x, keys.mT, alpha=scale)
    if x.device.type == "cuda":
        return torch.bmm(x, keys.mT, out_dtype=bias.dtype).mul_(scale).add_(bias)
    with torch.autocast(x.device.type, enabled=False):
        return torch.baddbmm(bias, x.to(bias.dtype), keys.to(bias.dtype).mT, alpha=scale)


def _summed(x: Float[Tensor, "R K n"]) -> Float[Tensor, "R n"]:
    """Pairwise over K, so that missing pages only add zeros and no bit depends on K."""
    while (levels := x.shape[1]) > 1:
        even = x[:, : levels // 2 * 2 : 2] + x[:, 1::2]
        x = torch.cat([even, x[:, -1:]], dim=1) if levels % 2 else even
    return x[:, 0]
