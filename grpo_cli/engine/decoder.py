"""One forward step over the Hugging Face module's own layers, with the cache as an argument.

Embedding, norms, projections, MLP and head are the trainer's modules (LoRA and quantised layers included), or copies of
them for one generation (`products.py`), so there are no weights to synchronise. Only attention is done here: in
prefill each prompt attends to itself; in decode each row attends to its prompt, whose keys are stored once for all its
rows, and to its own response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from grpo_cli.engine import products
from grpo_cli.engine.attention import Attention, by_triton, in_c, reference, runs_triton
from grpo_cli.engine.evictor import Evictor
from grpo_cli.engine.kv_cache import KvLayout, PagedCache, round_up
from grpo_cli.engine.layers import EAGER, NATIVE, Block, Compiled, Functions, Norm, activation_of, is_plain, norm_of
from grpo_cli.engine.products import Weights, linear_layers
from grpo_cli.engine.sequence import Rows, bucket
from grpo_cli.model.anatomy import unwrapped
from grpo_cli.model.packed import causal
from grpo_cli.model.transfer import send
from grpo_cli.native import ops

TILE = 16  # prompts are padded to a multiple of this number of tokens, so that few widths occur


@dataclass(frozen=True)
class Padding:
    """Padding of products to at least `least` rows and a multiple of `rows`: `determinism.py` finds the numbers with
    which a row's bits do not depend on its batch."""

    rows: int = 1
    least: int = 1

    def padded_rows(self, count: int) -> int:
        """Return the number of rows with padding.

        >>> Padding(rows=4, least=16).padded_rows(3), Padding(rows=4, least=16).padded_rows(17)
        (16, 20)
        """
        return -(-max(count, self.least) // self.rows) * self.rows


@dataclass(frozen=True)
class Decoder:
    """The layers of a supported causal language model (`of`), `prepared` for a generation.

    padding     of products
    may_pack    multiply by packed copies of a large model's weights, on a CPU
    functions   what a layer does around its attention: in PyTorch's operations, or in C (with its attention)
    compiled    the same for steps, where layers consist of plain weights
    backend     of a step's attention
    blocks      the layers, by the weights of this generation; then the last norm and the head
    """

    model: Any
    layers: tuple[nn.Module, ...]
    padding: Padding = Padding()
    may_pack: bool = False
    functions: Functions = EAGER
    compiled: Functions | None = None
    backend: Callable[..., Attention] = reference
    blocks: tuple[Block, ...] = ()
    norm: Any = None
    head: Any = None

    @classmethod
    def of(cls, model: Any) -> Decoder:
        inner = unwrapped(model)
        return cls(inner, tuple(inner.model.layers))

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.model.embed_tokens.weight.device)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return self.model.model.embed_tokens.weight.dtype

    @property
    def precision(self) -> torch.dtype:
        """Precision of the computation: autocast's if on."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype

    @property
    def scale(self) -> float:
        return float(self.model.model.layers[0].self_attn.scaling)

    @property
    def layout(self) -> KvLayout:
        """The layout of one token's keys and values."""
        config, dim = self.model.config, int(self.model.model.layers[0].self_attn.head_dim)
        heads, by_token = config.num_key_value_heads, self.backend is by_triton
        group = config.num_attention_heads // heads
        return KvLayout(len(self.layers), heads, dim, self.precision, by_token, group)

    @property
    def promises_bits(self) -> bool:
        """True if a row's bits should not depend on its batch: float32 in C, autocast or not."""
        return self.is_native and self.precision == torch.float32

    @property
    def is_native(self) -> bool:
        """True if a step's small operations run in C."""
        return self.functions is NATIVE

    @property
    def can_be_native(self) -> bool:
        fits = self.device.type == "cpu" and {self.dtype, self.precision} <= {*ops.PRECISIONS}
        fits = fits and self.layout.dim <= ops.MOST_DIM and self.layout.dim % 2 == 0
        inner = self.model.model
        norms = [norm for layer in inner.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        fits = fits and all(isinstance(norm_of(norm), Norm) for norm in (*norms, inner.norm))
        return fits and all(activation_of(layer.mlp.act_fn) is F.silu for layer in inner.layers)

    @property
    def _is_small(self) -> bool:
        return sum(layer.weight.numel() for layer in linear_layers(self.model)) < products.PACKED_FROM

    @property
    def packs(self) -> bool:
        """True if rollouts multiply by packed copies."""
        return self.may_pack and self.device.type == "cpu" and not (self.compiled or self._is_small)

    def prepared(self, needs_received: bool = False) -> Decoder:
        """Return a decoder for one generation: weights in the precision of its products, and the fastest attention
        of this device; `needs_received`: one that also returns the attention that keys receive.

        Autocast would cast every weight again in every step, as it caches none under `inference_mode`. Weights of a
        small model on a CPU are joined, where a call takes as long as its product.
        """
        triton = not needs_received and runs_triton(self.device, self.layout.dim)
        backend = in_c if self.is_native else by_triton if triton else reference
        weights = Weights(self.precision, self.packs, joined=self._is_small and self.device.type == "cpu")
        blocks = tuple(Block.of(layer, weights) for layer in self.layers)
        compiled = self.compiled if is_plain(blocks) else None
        last = {"norm": norm_of(self.model.model.norm), "head": weights.of(self.model.lm_head)}
        return replace(self, backend=backend, blocks=blocks, compiled=compiled, **last)

    def logits(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R V"]:
        """Compute logits in the precision of the computation; sampling converts them to float32."""
        rows = hidden.shape[0]
        return self.head(_to(hidden.to(self.precision), self.padding.padded_rows(rows)))[:rows]

    def prefill(
        self, prompts: Sequence[Sequence[int]], needs_received: bool
    ) -> tuple[Float[Tensor, "L P H W D"], Float[Tensor, "L P H W D"], Float[Tensor, "P V"], list[Tensor]]:
        """Run prompts whose lengths round up to the same multiple of a tile, so that bits are those of any batch.
        Return keys, values and next-token logits, and by layer, if requested, the attention [P, H, W] that each key
        received from its prompt's queries (see `methods/h2o.py`)."""
        width = round_up(max(len(ids) for ids in prompts), TILE)
        assert all(round_up(len(ids), TILE) == width for ids in prompts), "one width per prefill"
        count, dim = len(prompts), self.layout.dim
        padded = np.array([[*p, *[p[-1]] * (width - len(p))] for p in prompts])
        ids, last = send(self.device, padded, np.array([row * width + len(p) - 1 for row, p in enumerate(prompts)]))
        shape, received = (len(self.layers), count, self.layout.heads, width, dim), list[Tensor]()
        keys, values = (torch.empty(shape, dtype=self.precision, device=self.device) for _ in range(2))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Right padding under a causal mask: no real token attends to padding.
            q, k, v = (t.view(count, width, -1, dim).transpose(1, 2) for t in (q, k, v))
            keys[layer], values[layer] = k, v  # copies: views would keep every layer's queries
            if needs_received:
                received.append(_received(q, k, [len(ids) for ids in prompts], self.scale))
            return causal(q, k, v, self.scale).transpose(1, 2).reshape(count * width, -1)

        positions = torch.arange(width, device=self.device).repeat(count)
        hidden = self.run(ids.view(-1), positions, attend, self.functions)
        return keys, values, self.logits(hidden[last]), received

    def step(self, rows: Rows, cache: PagedCache, evictor: Evictor | None = None) -> Float[Tensor, "R H"]:
        """Feed one token per row: write each row's key and value, and return the last hidden state."""
        note = evictor.add_attention if evictor is not None and evictor.policy.needs_received else None
        attend = self.backend(rows, cache, self.scale, note)
        attend = attend if evictor is None else evictor.of_step(rows, attend)
        return self.run(rows.tokens, rows.positions, attend, self.compiled or self.functions)

    def run(
        self,
        tokens: Int[Tensor, "N"],
        positions: Int[Tensor, "N"],
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        functions: Functions,
    ) -> Float[Tensor, "N H"]:
        """Run the blocks over a flat run of tokens; `attend` maps rotated q, k, v, [N, heads, dim] without padding
        rows, to [N, heads * dim]."""
        count, dtype = tokens.shape[0], self.precision
        total = max(self.padding.padded_rows(count), bucket(count) if isinstance(functions, Compiled) else 0)
        hidden, delta = _to(self.model.model.embed_tokens(tokens), total), None
        cos, sin = self.model.model.rotary_emb(hidden, positions[None])
        dim = cos.shape[-1]
        # For rotations, which expect the sign of the first half in the sine.
        cos = _to(cos[0], total)[:, None]
        sin = _to(torch.cat([-sin[0, :, : dim // 2], sin[0, :, dim // 2 :]], dim=-1), total)[:, None]
        for index, block in enumerate(self.blocks):
            q, k, v = functions.before(block, hidden, delta, cos, sin, dtype)
            attended = _to(attend(index, q[:count], k[:count], v[:count]), total)
            hidden, delta = functions.after(block, hidden, attended, dtype)
        return functions.norm(self.norm, hidden, delta, hidden.dtype)[:count]


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
