"""Attention of one decode step in one Triton kernel on a GPU, over blocks laid out by token: [tokens, heads, dim]."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from grpo_cli.engine.kv.cache import BLOCK, PagedCache
from grpo_cli.engine.step.attention import Attention
from grpo_cli.engine.step.rows import Rows


def reason_against(device: torch.device, dim: int) -> str:
    """Return why the kernel cannot run there; empty if it can."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if dim > 256:
        return f"its heads have at most 256 numbers, and the model's have {dim}"
    if torch.version.hip or (torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)):
        return "it needs a GPU of compute capability 8.0"
    return "" if find_spec("triton") or not torch.cuda.is_available() else "Triton is not installed"


# Spelt out, since PyTorch reads no annotations of a function that checks its own (jaxtyping's hook).
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a3!) keys, Tensor(a4!) values, Tensor own, Tensor held, Tensor write_at, "
    "Tensor prompt, Tensor seen, float scale) -> Tensor"
)


@torch.library.custom_op("grpo_cli::paged_attention", mutates_args=("keys", "values"), schema=_SCHEMA)
def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, own: Tensor, held: Tensor, write_at: Tensor,
    prompt: Tensor, seen: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Compute each row's attention over its prompt's keys, its own, and its new one, which is written too.

    q is [R, HG, D], k and v [R, H, D]; keys and values [tokens, H, D]; own and prompt [R, K] are tables of blocks;
    held, write_at and seen [R]: keys of a row before the step, where its new one goes, keys of its prompt.
    """
    raise NotImplementedError("the kernel runs on a GPU")


@paged_attention.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q)


@paged_attention.register_kernel("cuda")
def _(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, own: Tensor, held: Tensor, write_at: Tensor,
    prompt: Tensor, seen: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    from grpo_cli.engine.gpu.paged_kernel import launch

    return launch(q, k, v, keys, values, own, BLOCK, held, write_at, keys, values, prompt, BLOCK, seen, scale)


def in_one_kernel(rows: Rows, cache: PagedCache, scale: float) -> Attention:
    """Attention in one call for each layer."""
    write_at = rows.write_to * BLOCK + rows.held.remainder(BLOCK)
    memory = [memory.view(-1, *memory.shape[2:]) for memory in cache.memory]
    tables = rows.own, rows.held, write_at, rows.prompt, rows.seen

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        keys, values = memory[layer], memory[layer + cache.layout.layers]
        return paged_attention(*(x.to(keys.dtype) for x in (q, k, v)), keys, values, *tables, scale).flatten(1), None

    return attend
