"""Attention of one decode step: every row sees its prompt, stored once for all its rows, and then its own response.

The scores of the two parts are computed where the keys lie, joined for one softmax, and split again for the values. So
a group's prompt keys are read once per step and not once per rollout, and nothing is copied but queries and weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.engine.cache import KvStore, PromptPool


@dataclass(frozen=True)
class Rows:
    """Where the rows of a decode step read and write.

    `table` lists for each prompt entry the rows that belong to it (padded with row 0; those results are not read), and
    `place` finds each row's result in the flattened table. `in_order` says that the two are 0, 1, 2, ... without
    padding, so that nothing has to be moved.
    """

    tokens: Int[Tensor, "R"]
    positions: Int[Tensor, "R"]
    lengths: Int[Tensor, "R"]  # keys held in the slots before this step
    width: int  # slot keys to look at, a multiple of the slot tile that covers the longest row
    prompt_lengths: Int[Tensor, "R"] | None  # prompt keys that each row sees; None: all that there are
    blind: bool  # whether no row sees any
    table: Int[Tensor, "E C"]
    place: Int[Tensor, "R"]
    in_order: bool


@runtime_checkable
class Watch(Protocol):
    """Sees what every layer of a step asks, and what it attends to."""

    def prepare(self, rows: Rows) -> None:
        """A step begins."""

    def see(self, layer: int, queries: Float[Tensor, "R HG D"], weights: Float[Tensor, "RH G n"]) -> None:
        """`weights` are over the prompts' keys (none when all rows are blind) and then the slots' first `width`."""


class StepAttention:
    """What all layers of one step share: the places to write, and what each row may look at."""

    def __init__(self, rows: Rows, slots: KvStore, prompts: PromptPool, group: int, scale: float, watch: Watch) -> None:
        self._rows, self._slots, self._prompts, self._watch = rows, slots, prompts, watch
        self._count = rows.tokens.shape[0]
        self._heads, self._group, self._dim = slots.layout.heads, group, slots.layout.dim
        self._scale = scale
        device, dtype = rows.lengths.device, slots.layout.dtype
        row_head = torch.arange(self._count * self._heads, device=device).view(self._count, self._heads)
        self._write_at = (row_head * slots.capacity + rows.lengths[:, None]).flatten()
        self._table = rows.table.flatten()
        self._entries, self._columns = rows.table.shape
        self._own_bias = self._bias(rows.lengths + 1, rows.width, dtype)
        self._prompt_width = 0 if rows.blind else prompts.store.capacity
        if rows.prompt_lengths is None:
            # An entry that nobody holds looks at one key, and its result is not read.
            self._prompt_bias = self._bias(prompts.lengths[: self._entries].clamp(min=1), self._prompt_width, dtype)
        else:
            by_row = self._bias(rows.prompt_lengths, self._prompt_width, dtype)
            self._prompt_bias = self._by_prompt(by_row.expand(-1, group, -1))
        watch.prepare(rows)

    def _bias(self, lengths: Int[Tensor, "N"], width: int, dtype: torch.dtype) -> Float[Tensor, "NH 1 n"]:
        """Added to the scores: 0 for the first `lengths` of `width` keys, -inf beyond; once for each head."""
        beyond = torch.arange(width, device=lengths.device) >= lengths[:, None]
        bias = torch.zeros(beyond.shape, device=lengths.device, dtype=dtype).masked_fill_(beyond, -torch.inf)
        return bias[:, None].expand(-1, self._heads, -1).reshape(len(lengths) * self._heads, 1, width)

    def __call__(
        self, layer: int, q: Float[Tensor, "R HG D"], k: Float[Tensor, "R H D"], v: Float[Tensor, "R H D"]
    ) -> Float[Tensor, "R HGD"]:
        """Write this step's keys and values, and attend. H is key-value heads, G queries per key-value head."""
        rows, slots, store = self._rows, self._slots, self._prompts.store
        slots.write(layer, self._write_at, k.reshape(-1, self._dim), v.reshape(-1, self._dim))
        own_keys = slots.layer_keys[layer][: self._count].flatten(0, 1)[:, : rows.width]
        own_values = slots.layer_values[layer][: self._count].flatten(0, 1)[:, : rows.width]
        prompt_keys = store.layer_keys[layer][: self._entries].flatten(0, 1)[:, : self._prompt_width]
        prompt_values = store.layer_values[layer][: self._entries].flatten(0, 1)[:, : self._prompt_width]
        grouped = q.reshape(self._count * self._heads, self._group, self._dim)
        shared = torch.baddbmm(self._prompt_bias, self._by_prompt(grouped), prompt_keys.mT, alpha=self._scale)
        own = torch.baddbmm(self._own_bias, grouped, own_keys.mT, alpha=self._scale)
        scores = torch.cat([self._by_row(shared), own], dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        self._watch.see(layer, q, weights)
        shared_weights, own_weights = weights.split([self._prompt_width, rows.width], dim=-1)
        out = self._by_row(torch.bmm(self._by_prompt(shared_weights), prompt_values))
        return torch.baddbmm(out, own_weights, own_values).view(self._count, -1)

    def _by_prompt(self, x: Float[Tensor, "RH G n"]) -> Float[Tensor, "EH CG n"]:
        """Rows laid out under their prompts, so that one product serves all rows of a prompt."""
        size = x.shape[-1]
        x = x.reshape(self._count, self._heads, self._group, size)
        if not self._rows.in_order:
            x = x.index_select(0, self._table)
        x = x.view(self._entries, self._columns, self._heads, self._group, size).transpose(1, 2)
        return x.reshape(self._entries * self._heads, self._columns * self._group, size)

    def _by_row(self, x: Float[Tensor, "EH CG n"]) -> Float[Tensor, "RH G n"]:
        """And back."""
        size = x.shape[-1]
        x = x.view(self._entries, self._heads, self._columns, self._group, size).transpose(1, 2)
        x = x.reshape(self._entries * self._columns, self._heads, self._group, size)
        if not self._rows.in_order:
            x = x.index_select(0, self._rows.place)
        return x.reshape(self._count * self._heads, self._group, size)
