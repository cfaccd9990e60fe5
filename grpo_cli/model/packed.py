"""Many sequences packed into one run of tokens without padding, with a shared prompt stored once for its completions.

The model's own layers do the work; only its attention knows where sequences begin and end, so that each token sees
exactly what it would see in a row of its own. A prompt's gradients add up over its completions automatically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from grpo_cli.model import tree_attention
from grpo_cli.model.anatomy import PACKING, backbone
from grpo_cli.model.mlp_recompute import last_states
from grpo_cli.model.transfer import send
from grpo_cli.model.varlen import Flash, Kernel, OnProcessor, Part, Spans, Trunks, attention

KERNELS: list[Kernel] = [Flash(), OnProcessor()]  # the first that takes the queries


@dataclass(frozen=True)
class Tree:
    """A trunk (prompt) and the branches (completions) after it, in this order; a plain sequence has no branches."""

    trunk: int
    branches: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.trunk + sum(self.branches)


class Layout:
    """The positions of a run's trees and what their branches may attend to (built once for all layers).
    `natively`: they are computed in C where that serves."""

    def __init__(self, trees: Sequence[Tree], device: torch.device, natively: bool = False) -> None:
        self.trees = tuple(trees)
        self.in_c = tree_attention.Forest([(tree.trunk, *tree.branches) for tree in trees]) if natively else None
        self.sizes = [size for tree in trees for size in (tree.trunk, *tree.branches)]
        together = [[tree] for tree in trees] if device.type == "cpu" else [list(trees)]
        starts = accumulate((sum(map(len, some)) for some in together), initial=0)
        self.parts = tuple(_part(some, start, device) for some, start in zip(together, starts, strict=False))
        shapes = {(size, tree.trunk) for tree in trees for size in tree.branches}
        # A branch sees its whole trunk, and itself causally: ones up to the diagonal shifted right by `trunk`.
        self.masks = {
            (size, trunk): torch.ones(size, trunk + size, dtype=torch.bool, device=device).tril(trunk)
            for size, trunk in shapes
        }


def _part(trees: Sequence[Tree], start: int, device: torch.device) -> Part:
    sizes = [size for tree in trees for size in (tree.trunk, *tree.branches)]
    return Part(start, sum(sizes), Spans.of(sizes, sizes, True, device), _trunks_of(trees, device))


def _trunks_of(trees: Sequence[Tree], device: torch.device) -> Trunks | None:
    """The trunks that branches attend to; None without branches."""
    starts = accumulate((len(tree) for tree in trees), initial=0)
    split = [(tree, start) for tree, start in zip(trees, starts, strict=False) if tree.branches]
    if not split:
        return None
    spans = Spans.of([sum(tree.branches) for tree, _ in split], [tree.trunk for tree, _ in split], False, device)
    if len(trees) == 1:
        return Trunks(slice(trees[0].trunk, None), slice(trees[0].trunk), spans)
    branches = np.concatenate([np.arange(start + tree.trunk, start + len(tree)) for tree, start in split])
    trunks = np.concatenate([np.arange(start, start + tree.trunk) for tree, start in split])
    places, of = send(device, branches, trunks)
    return Trunks(places, of, spans)


def allow_packing(model: Any) -> None:
    """Make the model's attention accept a `Layout`, or `Evicted`. Without one it is PyTorch's, with the masks that
    transformers builds for it."""
    backbone(model).config._attn_implementation = PACKING


def packed_hidden(
    model: Any, input_ids: Int[Tensor, "N"], trees: Sequence[Tree], natively: bool = False
) -> Float[Tensor, "N H"]:
    """The last hidden state of every token of the run. The model must have been through `allow_packing`; `natively` as
    `Layout` has it."""
    assert sum(len(tree) for tree in trees) == len(input_ids), "the trees cover the run"
    layout = Layout(trees, input_ids.device, natively)
    starts = [start for tree in trees for start in (0, *[tree.trunk] * len(tree.branches))]
    spans = [np.arange(start, start + size) for start, size in zip(starts, layout.sizes, strict=True)]
    (positions,) = send(input_ids.device, np.concatenate(spans))
    return last_states(model, input_ids=input_ids[None], position_ids=positions[None], packed_layout=layout)[0]


def causal(
    query: Float[Tensor, "B HG T D"], key: Float[Tensor, "B H T D"], value: Float[Tensor, "B H T D"], scale: float
) -> Float[Tensor, "B HG T D"]:
    """Causal self-attention of right-padded rows. No fused GPU kernel supports fewer key heads than query heads in
    float32, and without one B x HG x T x T scores would be stored."""
    alone = _wants_a_head_each(query)
    if alone:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=not alone)


def _wants_a_head_each(query: Tensor) -> bool:
    return query.device.type == "cuda" and query.dtype == torch.float32


def _attention(
    module: Any,
    query: Float[Tensor, "B HG N D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    attention_mask: Tensor | None,
    packed_layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in every layer: in C, by a flash kernel, or else part by part. The latter splits
    and joins once per layer: the backward of a slice is a full tensor of zeros, that of a split one concatenation."""
    if attention_mask is not None and attention_mask.numel() == 0:  # that of `without_mask`
        attention_mask = None
    alike = query.shape[2] == key.shape[2]  # unlike a step with a cache, whose token sees every key
    if packed_layout is None and attention_mask is None and alike and _wants_a_head_each(query):
        return causal(query, key, value, kwargs["scaling"]).transpose(1, 2).contiguous(), None
    if packed_layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    sizes, scale = packed_layout.sizes, kwargs["scaling"]
    if torch.is_autocast_enabled(query.device.type):  # as PyTorch's own attention would, but once and not in each part
        query, key, value = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (query, key, value))
    in_c = packed_layout.in_c if tree_attention.serves(query, key, value) else None
    kernel = next((kernel for kernel in KERNELS if kernel.takes(query)), None)
    if in_c is not None or kernel is not None:
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        if in_c is not None:
            return tree_attention.attention(q, k, v, in_c, scale)[None], None
        assert kernel is not None, "it is not None where the other is"
        return attention(q, k, v, packed_layout.parts, scale, kernel)[None], None
    group = module.num_key_value_groups
    queries = iter(query.split(sizes, dim=2))
    keys, values = (iter(repeat_kv(x, group).split(sizes, dim=2)) for x in (key, value))
    parts = []
    for tree in packed_layout.trees:
        q, trunk_k, trunk_v = next(queries), next(keys), next(values)
        parts.append(F.scaled_dot_product_attention(q, trunk_k, trunk_v, is_causal=True, scale=scale))
        for size in tree.branches:
            k, v = torch.cat([trunk_k, next(keys)], dim=2), torch.cat([trunk_v, next(values)], dim=2)
            mask = packed_layout.masks[size, tree.trunk]
            parts.append(F.scaled_dot_product_attention(next(queries), k, v, attn_mask=mask, scale=scale))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKING, _attention)
AttentionMaskInterface.register(PACKING, sdpa_mask)  # without one no padding and no sliding window is hidden
