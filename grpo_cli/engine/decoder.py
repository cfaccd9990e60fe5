"""One forward step over the Hugging Face module's own layers, with the cache as an argument.

Embedding, norms, projections, MLP and head are the trainer's modules (LoRA and quantised layers included), so there are
no weights to keep in step. Only attention is done here: in prefill each prompt sees itself; in decode each row sees
its prompt, whose keys are stored once for all its rows, and then its own response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.engine.cache import TILE, KvLayout, KvStore, PromptPool, round_up, slot_tile
from grpo_cli.model.anatomy import unwrapped

# The fewest rows a thread must get for a float32 matrix product on a CPU to give each row the same bits whatever the
# number of rows (measured for MKL: pieces of 1, 2, 3, 5 and 7 rows take other kernels). Fewer rows are padded.
ROWS_PER_THREAD = 8


@dataclass(frozen=True)
class Prefilled:
    """Prompts after their forward pass: keys and values [layers, P, heads, width, dim], and what comes next."""

    keys: Tensor
    values: Tensor
    logits: Float[Tensor, "P V"]


@dataclass(frozen=True)
class Rows:
    """Where the rows of a decode step read and write.

    `table` lists for each prompt entry the rows that belong to it (padded with row 0; those results are not read), and
    `place` finds each row's result in the flattened table.
    """

    tokens: Int[Tensor, "R"]
    positions: Int[Tensor, "R"]
    lengths: Int[Tensor, "R"]  # response keys held before this step
    width: int  # response keys to look at, a multiple of the slot tile that covers the longest row
    table: Int[Tensor, "E C"]
    place: Int[Tensor, "R"]


class Decoder:
    """Drives the blocks of a supported causal language model."""

    def __init__(self, model: Any) -> None:
        inner = unwrapped(model)
        self._embed = inner.model.embed_tokens
        self._layers = inner.model.layers
        self._norm = inner.model.norm
        self._rotary = inner.model.rotary_emb
        self._head = inner.lm_head
        attention = self._layers[0].self_attn
        self._dim: int = attention.head_dim
        self._scale: float = attention.scaling
        config = inner.config
        self._kv_heads: int = config.num_key_value_heads
        self._per_kv_head: int = config.num_attention_heads // config.num_key_value_heads
        self.vocabulary: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.context: int = config.max_position_embeddings
        self.slot_tile = slot_tile(self._per_kv_head, self._dim)
        self._min_rows = ROWS_PER_THREAD * torch.get_num_threads() if self.device.type == "cpu" else 1

    def layout(self) -> KvLayout:
        """One token's keys and values; in the computation's precision, so autocast's when it is on."""
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
        return KvLayout(len(self._layers), self._kv_heads, self._dim, dtype)

    @property
    def device(self) -> torch.device:
        return self._embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embed.weight.dtype

    def logits(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R V"]:
        rows = hidden.shape[0]
        return self._head(self._pad_rows(hidden))[:rows].float()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled:
        """Run prompts whose lengths round up to the same multiple of TILE (so that company changes no bits)."""
        width = round_up(max(len(ids) for ids in prompts), TILE)
        assert all(round_up(len(ids), TILE) == width for ids in prompts), "one width per prefill"
        ids = torch.tensor([[*p, *[p[-1]] * (width - len(p))] for p in prompts], device=self.device)
        count = len(prompts)
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Right padding under a causal mask: no real token ever sees a padding one.
            split = [t.view(count, width, -1, self._dim).transpose(1, 2) for t in (q, k, v)]
            keys.append(split[1])
            values.append(split[2])
            out = F.scaled_dot_product_attention(*split, is_causal=True, scale=self._scale, enable_gqa=True)
            return out.transpose(1, 2).reshape(count * width, -1)

        positions = torch.arange(width, device=self.device).repeat(count)
        hidden = self._blocks(ids.view(-1), positions, attend).view(count, width, -1)
        last = torch.tensor([len(p) - 1 for p in prompts], device=self.device)
        return Prefilled(torch.stack(keys), torch.stack(values), self.logits(hidden[torch.arange(count), last]))

    def step(self, rows: Rows, slots: KvStore, prompts: PromptPool) -> Float[Tensor, "R H"]:
        """Feed one token per row; writes each row's key and value at its length, returns the last hidden state."""
        count, heads, group, dim = rows.tokens.shape[0], self._kv_heads, self._per_kv_head, self._dim
        at = torch.arange(count * heads, device=self.device).view(count, heads) * slots.capacity + rows.lengths[:, None]
        at = at.flatten()
        # Added to the scores: 0 where a row may look, -inf elsewhere.
        ahead = torch.arange(rows.width, device=self.device) > rows.lengths[:, None]
        response_bias = torch.zeros(ahead.shape, device=self.device, dtype=self.dtype).masked_fill_(ahead, -torch.inf)
        response_bias = response_bias.repeat_interleave(heads, 0)[:, None, :]
        entries, column = rows.table.shape
        beyond = (
            torch.arange(prompts.store.capacity, device=self.device) >= prompts.lengths.clamp(min=1)[:entries, None]
        )
        prompt_bias = torch.zeros(beyond.shape, device=self.device, dtype=self.dtype).masked_fill_(beyond, -torch.inf)
        prompt_bias = prompt_bias.repeat_interleave(heads, 0)[:, None, :]
        table = rows.table.flatten()
        scale = self._scale

        def to_prompts(x: Tensor) -> Tensor:  # [R, heads, group, n] -> [entries * heads, column * group, n]
            x = x.index_select(0, table).view(entries, column, heads, group, -1).transpose(1, 2)
            return x.reshape(entries * heads, column * group, -1)

        def to_rows(x: Tensor) -> Tensor:  # and back, flattened to [R * heads, group, n]
            x = x.view(entries, heads, column, group, -1).transpose(1, 2).reshape(entries * column, heads, group, -1)
            return x.index_select(0, rows.place).view(count * heads, group, -1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q[:count], k[:count], v[:count]
            slots.write(layer, at, k.reshape(-1, dim), v.reshape(-1, dim))
            own_k = slots.keys[layer, :count].flatten(0, 1)[:, : rows.width]
            own_v = slots.values[layer, :count].flatten(0, 1)[:, : rows.width]
            prompt_k = prompts.store.keys[layer, :entries].flatten(0, 1)
            prompt_v = prompts.store.values[layer, :entries].flatten(0, 1)
            grouped = q.reshape(count * heads, group, dim)
            own = torch.baddbmm(response_bias, grouped, own_k.mT, alpha=scale)
            asking = to_prompts(grouped.view(count, heads, group, dim))
            shared = torch.baddbmm(prompt_bias, asking, prompt_k.mT, alpha=scale)
            scores = torch.cat([to_rows(shared), own], dim=-1)
            weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
            shared_weights, own_weights = weights.split([prompts.store.capacity, rows.width], dim=-1)
            out = to_rows(torch.bmm(to_prompts(shared_weights.reshape(count, heads, group, -1)), prompt_v))
            out = torch.baddbmm(out, own_weights, own_v)
            return self._pad_rows(out.view(count, -1))

        return self._blocks(rows.tokens, rows.positions, attend)[:count]

    def _blocks(
        self,
        tokens: Int[Tensor, "N"],
        positions: Int[Tensor, "N"],
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
    ) -> Float[Tensor, "M H"]:
        """The model's blocks over a flat run of tokens; `attend` gets q, k, v as [M, heads, dim], rotated."""
        hidden = self._pad_rows(self._embed(tokens))
        cos, sin = self._rotary(hidden, positions[None])
        cos, sin = self._pad_rows(cos[0])[:, None], self._pad_rows(sin[0])[:, None]
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer.self_attn, layer.input_layernorm(hidden), cos, sin)
            hidden = hidden + layer.self_attn.o_proj(attend(index, q, k, v))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self._norm(hidden)

    def _project(self, attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = attention.q_proj(x).view(x.shape[0], -1, self._dim)
        k = attention.k_proj(x).view(x.shape[0], -1, self._dim)
        v = attention.v_proj(x).view(x.shape[0], -1, self._dim)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def _pad_rows(self, x: Float[Tensor, "N ..."]) -> Tensor:
        """Zero rows below, so that there are enough of them (see ROWS_PER_THREAD)."""
        missing = self._min_rows - x.shape[0]
        return x if missing <= 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def _rotate(x: Float[Tensor, "N heads D"], cos: Float[Tensor, "N 1 D"], sin: Float[Tensor, "N 1 D"]) -> Tensor:
    """Rotary position embedding, halves convention (that of the supported families)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
