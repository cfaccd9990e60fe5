"""PyTorch's FlashAttention operation as plain arithmetic, so that what calls it is tried on a CPU in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_cli.engine.gpu import flash
from grpo_cli.engine.step import decoder as decoders


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    seqused_k: Tensor,
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps, with what the kernels demand and leave undone: numbers that nobody asked for are never
    written, and a sequence without keys has a log-sum-exp of +inf."""
    batch, (questions, heads, dim) = len(cum_seq_q) - 1, q.shape
    assert cum_seq_q.dtype == cum_seq_k.dtype == seqused_k.dtype == torch.int32 and seqused_k.shape == (batch,)
    assert cum_seq_k.shape == (batch + 1,) and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape[1:] == v.shape[1:] == (k.shape[1], dim) and heads % k.shape[1] == 0 and dim % 8 == 0
    assert not dropout_p and not is_causal and not return_debug_mask and batch > 0
    assert max_q > 1 or questions == batch, "of one question a sequence, every sequence is asked"
    out, logsumexp = torch.full((questions, heads, dim), torch.nan), torch.full((heads, questions), torch.nan)
    for sequence, used in enumerate(seqused_k.tolist()):
        asked = slice(*cum_seq_q[sequence : sequence + 2].tolist())
        first = int(cum_seq_k[sequence])
        assert asked.stop - asked.start <= max_q and 0 <= used <= max_k and first + used <= len(k)
        keys, values = (x[first : first + used].repeat_interleave(heads // k.shape[1], 1).float() for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[asked].float(), keys) * scale
        out[asked] = torch.einsum("hqk,khd->qhd", scores.softmax(-1) if used else scores, values)
        logsumexp[:, asked] = scores.logsumexp(-1) if used else torch.inf
    return out.to(q.dtype), logsumexp


def force(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every step attends by it, whatever the device and the precision; returns what grows by a shape for each call."""
    calls: list[Any] = []

    def noted(*operands: Any, **words: Any) -> tuple[Tensor, Tensor]:
        calls.append(operands[0].shape)
        return forward(*operands, **words)

    monkeypatch.setattr(flash, "_forward", noted)
    monkeypatch.setattr(decoders, "reason_against", lambda device, dtype, dim: "")
    return calls
