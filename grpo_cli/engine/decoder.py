"""One forward step over the Hugging Face module's own layers, with the cache as an argument.

Embedding, norms, projections, MLP and head are the trainer's modules (LoRA and quantised layers included), or copies of
them for one generation (`rollout_weights.py`), so there are no weights to synchronise. Only attention is done here: in
prefill each prompt attends to itself; in decode each row attends to its prompt, whose keys are stored once for all its
rows, and to its own response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from grpo_cli.engine.attention import no_triton, paged_attention
from grpo_cli.engine.eviction import Evictor
from grpo_cli.engine.kv_cache import BLOCK, KvLayout, PagedCache, round_up
from grpo_cli.engine.layers import EAGER, NATIVE, Block, Functions, norm_of, serves_natively
from grpo_cli.engine.rollout_weights import AsTheyAre, Copies, Product, can_pack, linear_layers
from grpo_cli.engine.running_batch import Rows
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
    """Products are padded to at least `least` rows and a multiple of `rows`: `determinism.py` finds the numbers with
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


@dataclass(frozen=True)
class Decoder:
    """Runs the blocks of a supported causal language model (`of`); `prepared` for a generation.

    padding     of products
    may_pack    multiply by packed copies of a large model's weights, on a CPU
    functions   what a layer does around its attention: in PyTorch's operations, or in C (with its attention)
    compiled    the same for steps, where layers consist of plain weights
    backend     of a step's attention
    """

    model: Any
    blocks: tuple[Block, ...]
    norm: Any
    head: Product
    padding: Padding = Padding()
    may_pack: bool = False
    functions: Functions = EAGER
    compiled: Functions | None = None
    backend: str = "reference"

    @classmethod
    def of(cls, model: Any, may_pack: bool = False) -> Decoder:
        inner = unwrapped(model)
        blocks = tuple(Block.of(layer, AsTheyAre()) for layer in inner.model.layers)
        return cls(inner, blocks, norm_of(inner.model.norm), inner.lm_head, may_pack=may_pack)

    @property
    def modules(self) -> nn.ModuleList:
        """The modules with linear layers."""
        return nn.ModuleList([*self.model.model.layers[: len(self.blocks)], self.model.lm_head])

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.model.embed_tokens.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.model.embed_tokens.weight.dtype
        return dtype

    @property
    def dim(self) -> int:
        return int(self.model.model.layers[0].self_attn.head_dim)

    @property
    def scale(self) -> float:
        return float(self.model.model.layers[0].self_attn.scaling)

    @property
    def group(self) -> int:
        """Queries per key-value head."""
        return int(self.model.config.num_attention_heads // self.model.config.num_key_value_heads)

    def layout(self) -> KvLayout:
        """Return the layout of one token's keys and values, in the precision of the computation (autocast's if on)."""
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
        heads, by_token = self.model.config.num_key_value_heads, self.backend == "triton"
        return KvLayout(len(self.blocks), heads, self.dim, dtype, by_token, self.group)

    @property
    def promises_bits(self) -> bool:
        """True if a row's bits should not depend on its batch: float32 on a CPU, autocast or not."""
        return self.device.type == "cpu" and self.layout().dtype == torch.float32

    @property
    def is_native(self) -> bool:
        """True if a step's small operations run in C."""
        return self.functions is NATIVE

    @property
    def can_be_native(self) -> bool:
        fits = self.device.type == "cpu" and {self.dtype, self.layout().dtype} <= {*ops.PRECISIONS}
        fits = fits and self.dim <= ops.MOST_DIM and self.dim % 2 == 0
        return fits and all(serves_natively(block, self.norm) for block in self.blocks)

    def no_triton(self, watched: bool) -> str:
        """Return why steps cannot attend by page tables on a GPU; empty if they can."""
        return "an eviction policy needs the attention weights" if watched else no_triton(self.device, self.dim)

    @property
    def is_small(self) -> bool:
        return sum(layer.weight.numel() for layer in linear_layers(self.modules)) < PACKED_FROM

    @property
    def packs(self) -> bool:
        """True if rollouts multiply by packed copies."""
        return self.may_pack and self.device.type == "cpu" and can_pack() and not self.is_small

    @property
    def keeps_adapters_apart(self) -> bool:
        """True if there are adapters on quantised weights, which cannot be copied and merged."""
        return any(
            "lora_A" in dict(module.named_children()) and type(module.base_layer) is not nn.Linear
            for module in self.modules.modules()
        )

    def prepared(self, watched: bool = False) -> Decoder:
        """Return it for one generation: with weights in the precision of steps, and with the fastest attention that
        this device has; `watched`: a policy needs the attention weights."""
        backend = "reference" if watched else "c" if self.is_native else "triton"
        if backend == "triton" and self.no_triton(watched):
            backend = "reference"
        other = replace(self.with_copies(), backend=backend)
        if self.compiled is None or all(block.is_plain for block in other.blocks):
            return other
        copies = Copies(self.layout().dtype, packed=False)
        blocks = other._blocks(copies)  # some were modules
        if not all(block.is_plain for block in blocks):
            return replace(other, compiled=None)
        return replace(other, blocks=blocks)

    def with_copies(self) -> Decoder:
        """Return it with weights in the precision of a step's products: under autocast, copies of their current values.

        Autocast would cast every weight again in every step, as it caches none under `inference_mode`. Weights that are
        already in that precision and not packed are not copied, but for those of a small model on a CPU, where a call
        takes as long as its product; neither are quantised ones.
        """
        dtype, packed, joined = self.layout().dtype, self.packs, self.is_small and self.device.type == "cpu"
        if not (packed or joined) and all(layer.weight.dtype == dtype for layer in linear_layers(self.modules)):
            return self
        copies = Copies(dtype, packed, joined)
        return replace(self, blocks=self._blocks(copies), head=copies.of(self.head))

    def _blocks(self, copies: Copies) -> tuple[Block, ...]:
        return tuple(Block.of(layer, copies) for layer in self.model.model.layers[: len(self.blocks)])

    @property
    def copies(self) -> list[Tensor]:
        """The copies of weights."""
        of_model = storages(self.modules.parameters())
        held = tensors_of([*self.blocks, self.head])
        return [tensor for tensor in held if tensor.is_mkldnn or tensor.untyped_storage()._cdata not in of_model]

    def logits(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R V"]:
        """Compute logits in the precision of the computation; sampling converts them to float32."""
        rows = hidden.shape[0]
        return self.head(_to(hidden.to(self.layout().dtype), self.padding.padded_rows(rows)))[:rows]

    def prefill(self, prompts: Sequence[Sequence[int]], note_received: bool) -> Prefilled:
        """Run prompts whose lengths round up to the same multiple of a tile, so that bits are those of any batch."""
        width = round_up(max(len(ids) for ids in prompts), BLOCK)
        assert all(round_up(len(ids), BLOCK) == width for ids in prompts), "one width per prefill"
        count, dim = len(prompts), self.dim
        padded = np.array([[*p, *[p[-1]] * (width - len(p))] for p in prompts])
        ids, last = send(self.device, padded, np.array([row * width + len(p) - 1 for row, p in enumerate(prompts)]))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        received: list[Tensor] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Right padding under a causal mask: no real token ever sees a padding one.
            q, k, v = (t.view(count, width, -1, dim).transpose(1, 2) for t in (q, k, v))
            keys.append(k)
            values.append(v)
            if note_received:
                received.append(_received(q, k, [len(ids) for ids in prompts], self.scale))
            return causal(q, k, v, self.scale).transpose(1, 2).reshape(count * width, -1)

        positions = torch.arange(width, device=self.device).repeat(count)
        hidden = self.run(ids.view(-1), positions, attend, self.functions)
        return Prefilled(
            torch.stack(keys),
            torch.stack(values),
            self.logits(hidden[last]),
            torch.stack(received) if note_received else None,
        )

    def step(self, rows: Rows, cache: PagedCache, evictor: Evictor) -> Float[Tensor, "R H"]:
        """Feed one token per row: write each row's key and value, and return the last hidden state."""
        attention = paged_attention(self.backend, rows, cache, self.scale)
        evictor.prepare(rows)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attended, weights = attention(layer, q, k, v)
            evictor.see(layer, q, weights)
            return attended

        return self.run(rows.tokens, rows.positions, attend, self.compiled or self.functions)

    def run(
        self,
        tokens: Int[Tensor, "N"],
        positions: Int[Tensor, "N"],
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        functions: Functions,
    ) -> Float[Tensor, "N H"]:
        """Run the blocks over a flat run of tokens; `attend` gets rotated q, k, v as [N, heads, dim], without padding
        rows, and returns [N, heads * dim]."""
        count, dtype, dim = tokens.shape[0], self.layout().dtype, self.dim
        total = max(self.padding.padded_rows(count), functions.rows(count))
        hidden = _to(self.model.model.embed_tokens(tokens), total)
        cos, sin = self.model.model.rotary_emb(hidden, positions[None])
        # For rotations, which expect the sign of the first half in the sine.
        cos = _to(cos[0], total)[:, None]
        sin = _to(torch.cat([-sin[0, :, : dim // 2], sin[0, :, dim // 2 :]], dim=-1), total)[:, None]
        for index, block in enumerate(self.blocks):
            q, k, v = functions.before(block, hidden, cos, sin, dtype)
            attended = _to(attend(index, q[:count], k[:count], v[:count]), total)
            hidden = functions.after(block, hidden, attended, dtype)
        return functions.last(self.norm, hidden)[:count]


def _to(x: Float[Tensor, "N ..."] | Int[Tensor, "N ..."], rows: int) -> Tensor:
    """Pad with zero rows to `rows`."""
    missing = rows - x.shape[0]
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def _received(
    q: Float[Tensor, "P HG W D"], k: Float[Tensor, "P H W D"], lengths: Sequence[int], scale: float
) -> Float[Tensor, "P H W"]:
    """Compute the attention that each key receives under a causal mask: summed over the prompt's queries, mean over a
    key's group. One prompt at a time, so that only one prompt's weights exist.
    """
    received = torch.zeros(k.shape[:3], device=k.device)
    for row, length in enumerate(lengths):
        queries, keys = q[row, :, :length].unflatten(0, (k.shape[1], -1)), k[row, :, None, :length]
        later = torch.ones(length, length, dtype=torch.bool, device=k.device).triu(1)
        logits = (queries @ keys.mT * scale).masked_fill(later, -torch.inf)
        received[row, :, :length] = logits.softmax(-1, dtype=torch.float32).sum(-2).mean(1)
    return received
