"""A model as vLLM sees it: its config, and the policy's weights in the shapes of that config.

vLLM's CPU kernels support only a few head sizes. A model of another size is served as a Llama with the next larger one:
the heads' new columns are zero and not rotated, and queries are scaled to keep the scale of the attention. The function
is the same up to rounding; the cache is larger by the ratio of the sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_cli.model.anatomy import unwrapped
from grpo_cli.support.errors import UserError


@dataclass(frozen=True)
class Served:
    """`config` as in a config.json. Heads have `head_dim` numbers in the model and `served_dim` in vLLM."""

    config: Mapping[str, Any]
    head_dim: int
    served_dim: int

    @classmethod
    def of(cls, model: Any, head_sizes: Sequence[int] | None) -> Served:
        """Return how vLLM serves a model, by the head sizes that it supports (None: any). UserError if none fits."""
        inner = unwrapped(model)
        attention = inner.model.layers[0].self_attn
        dim: int = attention.head_dim
        if not attention.q_proj.weight.is_floating_point():
            raise UserError("engine=vllm cannot serve a quantised base: use model.quantize=none, or engine=torch")
        # Never tied: if kernels repack the head, vLLM's reloading would not update it.
        config = inner.config.to_dict() | {"architectures": [type(inner).__name__], "tie_word_embeddings": False}
        if head_sizes is None or dim in head_sizes:
            return cls(config, dim, dim)
        larger = [size for size in sorted(head_sizes) if size > dim]
        if not larger or hasattr(attention, "q_norm"):  # whose norms forbid larger heads
            found = f"{type(inner).__name__} with heads of {dim} numbers"
            raise UserError(f"engine=vllm cannot serve {found} here, only of {head_sizes}; use engine=torch")
        rope = dict(config["rope_parameters"]) | {"partial_rotary_factor": (dim + 0.5) / larger[0]}
        as_llama = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "head_dim": larger[0],
            "rope_parameters": rope,
            "attention_bias": attention.o_proj.bias is not None,
            "qkv_bias": attention.q_proj.bias is not None,
        }
        return cls(config | as_llama, dim, larger[0])

    def check_dtype(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raise UserError for head sizes with which vLLM's rotary kernel for CPUs would crash the process."""
        if device.type == "cpu" and dtype.itemsize == 2 and self.head_dim % 16:
            raise UserError(
                f"engine=vllm on a CPU computes heads of {self.head_dim} numbers, no multiple of 16, in float32 only: "
                "use model.dtype=float32 model.autocast=none, or engine=torch"
            )

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in vLLM's cache, over all layers."""
        layers, heads = self.config["num_hidden_layers"], self.config["num_key_value_heads"]
        return int(2 * layers * heads * self.served_dim * dtype.itemsize)

    def weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights (`model.anatomy.merged_weights`) in the shapes that vLLM has for them: rows of q, k
        and v, and columns of o, for larger heads."""
        for name, weight in weights:
            projection = name.rsplit(".", 2)[-2]
            if self.served_dim > self.head_dim and projection in ("q_proj", "k_proj", "v_proj"):
                # vLLM divides by the root of the larger size.
                scale = (self.served_dim / self.head_dim) ** 0.5 if projection == "q_proj" else 1.0
                yield name, self._widened(weight) * scale
            elif self.served_dim > self.head_dim and name.endswith("o_proj.weight"):
                yield name, self._widened(weight.T).T.contiguous()
            else:
                yield name, weight

    def _widened(self, rows: Tensor) -> Tensor:
        """Add rows of zeros to those of each head."""
        heads = rows.unflatten(0, (-1, self.head_dim))
        zeros = heads.new_zeros(heads.shape[0], self.served_dim - self.head_dim, *heads.shape[2:])
        return torch.cat([heads, zeros], 1).flatten(0, 1)
