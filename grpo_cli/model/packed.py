"""Many sequences packed into one run of tokens without padding, with a shared prompt stored once for its completions.

The model's own layers do the work; only its attention knows where sequences begin and end, so that each token sees
exactly what it would see in a row of its own. A prompt's gradients add up over its completions automatically.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from grpo_cli.model import flash
from grpo_cli.model.anatomy import PACKING, backbone
from grpo_cli.model.checkpointing import last_states
from grpo_cli.model.transfer import send
from grpo_cli.native.ops import PRECISIONS, Trees, flat, reference, tree_attention


def _of_trees(trees: Trees, natively: bool, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute the attention of [N, heads, D] queries, keys and values by a flash kernel, by C on a CPU if `natively`,
    or by the reference."""
    if flash.serves(q) or (natively and q.device.type == "cpu" and q.dtype == k.dtype == v.dtype in PRECISIONS):
        q, k, v = (x.contiguous() for x in (q, k, v))
        return tree_attention(q, k, v, flat(trees), scale)[0]
    return reference(q, k, v, trees, scale).contiguous()


def allow_packing(model: Any) -> None:
    """Make the model's attention accept that of trees. Without it, it is PyTorch's, with the masks that transformers
    builds for it."""
    backbone(model).config._attn_implementation = PACKING


def packed_hidden(
    model: Any, input_ids: Int[Tensor, "N"], trees: Trees, natively: bool = False
) -> Float[Tensor, "N H"]:
    """Compute the last hidden state of every token of the run."""
    allow_packing(model)
    assert sum(map(sum, trees)) == len(input_ids), "the trees cover the run"
    spans = [np.arange(size) + (tree[0] if place else 0) for tree in trees for place, size in enumerate(tree)]
    (positions,) = send(input_ids.device, np.concatenate(spans))
    attend = partial(_of_trees, trees, natively)
    return last_states(model, input_ids=input_ids[None], position_ids=positions[None], of_trees=attend)[0]


def causal(
    query: Float[Tensor, "B HG T D"], key: Float[Tensor, "B H T D"], value: Float[Tensor, "B H T D"], scale: float
) -> Float[Tensor, "B HG T D"]:
    """Compute causal self-attention of right-padded rows. No fused GPU kernel supports fewer key heads than query heads
    in float32, and without one B x HG x T x T scores would be stored."""
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
    of_trees: Callable[..., Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention; transformers calls this."""
    if of_trees is not None:
        if torch.is_autocast_enabled(query.device.type):  # as PyTorch's own attention would
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (x.to(dtype) for x in (query, key, value))
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return of_trees(q, k, v, kwargs["scaling"])[None], None
    if attention_mask is not None and attention_mask.numel() == 0:  # that of `without_mask`
        attention_mask = None
    alike = query.shape[2] == key.shape[2]  # unlike a step with a cache, whose token sees every key
    if attention_mask is None and alike and _wants_a_head_each(query):
        return causal(query, key, value, kwargs["scaling"]).transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(PACKING, _attention)
AttentionMaskInterface.register(PACKING, sdpa_mask)  # without one no padding and no sliding window is hidden
