"""One forward step over the Hugging Face module's own layers, with the cache as an argument.

Embedding, norms, projections, MLP and head are the trainer's modules (LoRA and quantised layers included), or copies of
them for one generation (`weights.py`), so there are no weights to synchronise. Only attention is done here: in prefill
each prompt attends to itself; in decode each row attends to its prompt, whose keys are stored once for all its rows,
and to its own response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from grpo_cli.engine.gpu.compiled import Compiled, Functions
from grpo_cli.engine.gpu.paged import in_one_kernel, reason_against
from grpo_cli.engine.kv.cache import BLOCK, KvLayout, PagedCache, round_up
from grpo_cli.engine.kv.eviction import Budget, Dense, watches
from grpo_cli.engine.kv.keeper import KeepAll
from grpo_cli.engine.step import native
from grpo_cli.engine.step.attention import Attention, reference
from grpo_cli.engine.step.block import EAGER, Block, norm_of
from grpo_cli.engine.step.rows import Rows
from grpo_cli.engine.step.weights import (
    AsTheyAre,
    Copies,
    Product,
    can_pack,
    linear_layers,
)
from grpo_cli.model.anatomy import unwrapped
from grpo_cli.model.packed import causal
from grpo_cli.model.transfer import send
from grpo_cli.native import ops
from grpo_cli.support.memory import storages, tensors_of


@dataclass(frozen=True)
class Prefilled:
    """Prompts after their forward pass: keys and values [layers, P, heads, width, dim], and next-token logits.

    `received`, if requested, is the attention that each key received from its prompt's queries (see `methods/h2o.py`).
    """

    keys: Tensor
    values: Tensor
    logits: Float[Tensor, "P V"]
    received: Float[Tensor, "L P H W"] | None


@dataclass(frozen=True)
class Padding:
    """Products are padded to at least `least` rows and a multiple of `rows`: `invariance.py` finds the numbers with
    which a row's bits do not depend on its batch."""

    rows: int = 1
    least: int = 1

    def padded_rows(self, count: int) -> int:
        """
        >>> Padding(rows=4, least=16).padded_rows(3), Padding(rows=4, least=16).padded_rows(17)
        (16, 20)
        """
        return round_up(max(count, self.least), self.rows)


# The number of weights from which copies are packed: more than fit a processor's caches, from which unpacked ones are
# read just as fast. Preparing a packed product for a new number of rows takes a millisecond, too long for few weights.
PACKED_FROM = 2**23


class Decoder:
    """Runs the blocks of a supported causal language model, padded as `padding` says (by default hardly at all).

    With `packed`, rollouts on a CPU multiply by packed copies of a large model's weights."""

    def __init__(self, model: Any, padding: Padding = Padding(), packed: bool = False) -> None:
        inner = unwrapped(model)
        self._embed = inner.model.embed_tokens
        self._layers = list(inner.model.layers)
        self._blocks_of_model = [Block.of(layer, AsTheyAre()) for layer in self._layers]
        self._norm = norm_of(inner.model.norm)
        self._rotary = inner.model.rotary_emb
        self._head: Product = inner.lm_head
        self._modules = nn.ModuleList([*self._layers, inner.lm_head])
        attention = inner.model.layers[0].self_attn
        self.dim: int = attention.head_dim
        self.scale: float = attention.scaling
        config = inner.config
        self._kv_heads: int = config.num_key_value_heads
        self.group: int = config.num_attention_heads // config.num_key_value_heads  # queries per key-value head
        self.vocabulary: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.context: int = config.max_position_embeddings
        self.padding = padding
        self._packed = packed
        self._weights: AsTheyAre | Copies = AsTheyAre()  # how blocks and head were made
        self._by_tables = self._attends_natively = False
        self._functions = self._plain = self._to_compile = EAGER

    def _with(self, **changed: Any) -> Decoder:
        """A copy with changed attributes."""
        other = copy(self)
        vars(other).update(changed)
        return other

    def padded(self, padding: Padding) -> Decoder:
        """The same blocks with other padding."""
        return self._with(padding=padding)

    def may_pack(self, packed: bool) -> Decoder:
        """The same, with its copies packed or not."""
        return self._with(_packed=packed)

    def may_compile(self, warn: Callable[[str], None]) -> Decoder:
        """The same, with compiled steps if layers consist of plain weights; calls `warn` if compilation fails."""
        return self._with(_to_compile=Compiled(EAGER, warn).functions)

    def natively(self, watched: bool) -> Decoder:
        """The same, with a step's small operations in C, which has to be there, if it has this device and precision."""
        fits = self.device.type == "cpu" and {self.dtype, self.layout().dtype} <= {*ops.PRECISIONS}
        fits = fits and all(native.serves(block, self._norm) for block in self._blocks_of_model)
        if not fits or self.dim > ops.MOST_DIM or self.dim % 2:
            return self
        return self._with(_functions=native.FUNCTIONS, _plain=native.FUNCTIONS, _attends_natively=not watched)

    @property
    def is_native(self) -> tuple[bool, bool]:
        """Whether a step's small operations, and its attention, run in C."""
        return self._plain is not EAGER, self._attends_natively

    def for_steps(self, sparsity: Dense | Budget) -> Decoder:
        """The same, with weights in their precision and the fastest decode steps for this device."""
        other = self.in_its_precision()
        other = other._with(_by_tables=not self.slow_since(watches(sparsity)))
        if self._to_compile.compiled:
            blocks = other._blocks_of_model
            if not all(block.is_plain for block in blocks):  # some are modules
                other._weights = Copies(self.layout().dtype, packed=False)
                blocks = [Block.of(layer, other._weights) for layer in self._layers]
            if all(block.is_plain for block in blocks):
                other._blocks_of_model, other._functions = blocks, self._to_compile
        return other

    def slow_since(self, watched: bool) -> str:
        """Why decode steps cannot attend by page tables; empty if they can."""
        if watched:
            return "an eviction policy needs the attention weights"
        return reason_against(self.device, self.dim)

    @property
    def packs(self) -> bool:
        """Whether rollouts multiply by packed copies."""
        if not self._packed or self.device.type != "cpu" or not can_pack():
            return False
        return not self._is_small

    @property
    def _is_small(self) -> bool:
        return sum(layer.weight.numel() for layer in linear_layers(self._modules)) < PACKED_FROM

    @property
    def keeps_adapters_apart(self) -> bool:
        """Whether there are adapters on quantised weights, which cannot be copied and merged."""
        return any(
            "lora_A" in dict(module.named_children()) and type(module.base_layer) is not nn.Linear
            for module in self._modules.modules()
        )

    def in_its_precision(self) -> Decoder:
        """The same, with weights in the precision of a step's products: under autocast, copies of their current values.

        Autocast would cast every weight again in every step, as it caches none under `inference_mode`. Weights that are
        already in that precision and not packed are not copied, but for those of a small model on a CPU, where a call
        takes as long as its product; neither are quantised ones.
        """
        dtype, packed, joined = self.layout().dtype, self.packs, self._is_small and self.device.type == "cpu"
        if isinstance(self._weights, Copies):
            return self
        if not (packed or joined) and all(layer.weight.dtype == dtype for layer in linear_layers(self._modules)):
            return self
        copies = Copies(dtype, packed, joined)
        blocks = [Block.of(layer, copies) for layer in self._layers]
        return self._with(_weights=copies, _blocks_of_model=blocks, _head=copies.of(self._head))

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies of weights, without packed ones."""
        return sum(storages(tensor for tensor in self.copies if not tensor.is_mkldnn).values())

    @property
    def copies(self) -> list[Tensor]:
        """The copies of weights."""
        of_model = storages(self._modules.parameters())
        held = tensors_of([*self._blocks_of_model, self._head])
        return [tensor for tensor in held if tensor.is_mkldnn or tensor.untyped_storage()._cdata not in of_model]

    def of_one_block(self) -> Decoder:
        """The same with only the first block."""
        return self._with(_layers=self._layers[:1], _blocks_of_model=self._blocks_of_model[:1])

    def weight_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a block's weights, adapters included."""
        return tuple(tuple(weight.shape) for weight in self._layers[0].parameters())

    def layout(self) -> KvLayout:
        """One token's keys and values, in the precision of the computation (autocast's if it is on)."""
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
        return KvLayout(len(self._blocks_of_model), self._kv_heads, self.dim, dtype, self._by_tables, self.group)

    @property
    def device(self) -> torch.device:
        return self._embed.weight.device

    @property
    def promises_bits(self) -> bool:
        """Whether a row's bits should not depend on its batch: float32 on a CPU, autocast or not."""
        return self.device.type == "cpu" and self.layout().dtype == torch.float32

    @property
    def dtype(self) -> torch.dtype:
        return self._embed.weight.dtype

    def logits(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R V"]:
        """In the precision of the computation; sampling converts them to float32."""
        rows = hidden.shape[0]
        return self._head(self._pad_rows(hidden.to(self.layout().dtype)))[:rows]

    def prefill(self, prompts: Sequence[Sequence[int]], note_received: bool) -> Prefilled:
        """Run prompts whose lengths round up to the same multiple of a tile, so that bits are those of any batch."""
        width = round_up(max(len(ids) for ids in prompts), BLOCK)
        assert all(round_up(len(ids), BLOCK) == width for ids in prompts), "one width per prefill"
        count = len(prompts)
        padded = np.array([[*p, *[p[-1]] * (width - len(p))] for p in prompts])
        ids, last = send(self.device, padded, np.array([row * width + len(p) - 1 for row, p in enumerate(prompts)]))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        received: list[Tensor] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Right padding under a causal mask: no real token ever sees a padding one.
            q, k, v = (t.view(count, width, -1, self.dim).transpose(1, 2) for t in (q, k, v))
            keys.append(k)
            values.append(v)
            if note_received:
                received.append(_received(q, k, [len(ids) for ids in prompts], self.scale))
            return causal(q, k, v, self.scale).transpose(1, 2).reshape(count * width, -1)

        positions = torch.arange(width, device=self.device).repeat(count)
        hidden = self.blocks(ids.view(-1), positions, attend)
        return Prefilled(
            torch.stack(keys),
            torch.stack(values),
            self.logits(hidden[last]),
            torch.stack(received) if note_received else None,
        )

    def attention(self, rows: Rows, cache: PagedCache) -> Attention:
        """That of a step, by the backend for this device."""
        backend = native.attention if self._attends_natively else in_one_kernel if self._by_tables else reference
        return backend(rows, cache, self.scale)

    def step(self, rows: Rows, cache: PagedCache, keeper: KeepAll) -> Float[Tensor, "R H"]:
        """Feed one token per row; writes each row's key and value and returns the last hidden state."""
        attention = self.attention(rows, cache)
        keeper.prepare(rows)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attended, weights = attention(layer, q, k, v)
            keeper.see(layer, q, weights)
            return attended

        return self.blocks(rows.tokens, rows.positions, attend, self._functions)

    def blocks(
        self,
        tokens: Int[Tensor, "N"],
        positions: Int[Tensor, "N"],
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        functions: Functions | None = None,
    ) -> Float[Tensor, "N H"]:
        """The model's blocks over a flat run of tokens; `attend` gets rotated q, k, v as [N, heads, dim], without
        padding rows, and returns [N, heads * dim]."""
        functions = functions or self._plain
        count, dtype = tokens.shape[0], self.layout().dtype
        total = max(self.padding.padded_rows(count), functions.rows(count))
        hidden = _to(self._embed(tokens), total)
        cos, sin = self._rotary(hidden, positions[None])
        # For `_rotate`, which expects the sign of the first half in the sine.
        half = self.dim // 2
        cos = _to(cos[0], total)[:, None]
        sin = _to(torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1), total)[:, None]
        for index, block in enumerate(self._blocks_of_model):
            q, k, v = functions.before(block, hidden, cos, sin, dtype)
            attended = _to(attend(index, q[:count], k[:count], v[:count]), total)
            hidden = functions.after(block, hidden, attended, dtype)
        return functions.last(self._norm, hidden)[:count]

    def _pad_rows(self, x: Float[Tensor, "N ..."]) -> Tensor:
        """Append as many zero rows as `padding` requires."""
        return _to(x, self.padding.padded_rows(x.shape[0]))


def _to(x: Float[Tensor, "N ..."] | Int[Tensor, "N ..."], rows: int) -> Tensor:
    """Padded with zero rows to `rows`."""
    missing = rows - x.shape[0]
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def _received(
    q: Float[Tensor, "P HG W D"], k: Float[Tensor, "P H W D"], lengths: Sequence[int], scale: float
) -> Float[Tensor, "P H W"]:
    """The attention that each key receives under a causal mask: summed over the prompt's queries, mean over a key's
    group. One prompt at a time, so that only one prompt's weights exist.
    """
    received = torch.zeros(k.shape[:3], device=k.device)
    for row, length in enumerate(lengths):
        queries, keys = q[row, :, :length].unflatten(0, (k.shape[1], -1)), k[row, :, None, :length]
        later = torch.ones(length, length, dtype=torch.bool, device=k.device).triu(1)
        logits = (queries @ keys.mT * scale).masked_fill(later, -torch.inf)
        received[row, :, :length] = logits.softmax(-1, dtype=torch.float32).sum(-2).mean(1)
    return received
