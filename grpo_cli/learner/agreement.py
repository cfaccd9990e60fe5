"""Checks that packed rows give the same results as padded ones, on a few rows before the first update.

Otherwise a model family whose attention does not support packing would be trained on wrong log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_cli.interfaces import LossFn
from grpo_cli.learner.batch import to_device
from grpo_cli.learner.forward import Forward, prompt_groups, row_shapes
from grpo_cli.support.errors import UserError
from grpo_cli.types import Batch, Totals

# How much the two may differ by rounding: in mean log-probabilities and loss, and in relative gradients, which in
# bfloat16 are 0.03 to 0.12 apart on SmolLM2, by the replies.
_ROUNDING = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.1, 0.5)}
_ROWS_COMPARED = 4
_GRADIENTS_COMPARED = 4096  # numbers of each weight's gradient, evenly spread


@dataclass(frozen=True)
class Outcome:
    """The result of one forward of a micro-batch. `gradients` are samples, weight by weight."""

    logprobs: Float[Tensor, "B T"]
    loss: Tensor
    gradients: tuple[Tensor, ...]


def rows_to_compare(batch: Batch, tokens: int) -> Tensor:
    """A few rows of the largest group with one prompt, as many as fit into `tokens` when padded, at least one."""
    rows = max(prompt_groups(row_shapes(batch, True), True), key=len)[:_ROWS_COMPARED]
    widest = max(int(batch.lengths[row]) for row in rows)
    return torch.tensor(rows[: max(1, tokens // widest)])


def require_agreement(
    plain: Forward,
    other: Forward,
    model: Any,
    loss: LossFn,
    batch: Batch,
    totals: Totals,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Raises UserError, with the numbers, unless both give the same to rounding for `batch`: a few rows.

    Without dropout, and on-policy: with an old policy that was rounded differently, a narrow clip would make them
    differ. Advantages are set to +1 and -0.5, since real ones may all be 0 and hide a difference.
    """
    model.eval()
    signs = torch.where(torch.arange(len(batch)) % 2 == 0, 1.0, -0.5)
    batch = replace(batch, advantages=signs, policy_logprobs=None)
    expected, found = (_outcome(forward, model, loss, batch, totals, autocast()) for forward in (plain, other))
    whole = all(weight.dtype == torch.float32 for weight in model.parameters())
    with autocast():
        exact = whole and not torch.is_autocast_enabled(expected.logprobs.device.type)
    _compare(
        expected,
        found,
        batch.response_mask.to(expected.loss.device),
        _ROUNDING[torch.float32 if exact else torch.bfloat16],
    )


def _outcome(forward: Forward, model: Any, loss: LossFn, batch: Batch, totals: Totals, autocast: Any) -> Outcome:
    """Log-probabilities, loss and gradients of a micro-batch; the model's gradients are empty before and after."""
    with autocast:
        logprobs = forward.logprobs(model, batch)
    value = loss(logprobs, to_device(batch, logprobs.device), totals).loss
    value.backward()
    samples = []
    for weight in model.parameters():
        if not weight.requires_grad:
            continue
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        stride = max(1, gradient.numel() // _GRADIENTS_COMPARED)
        samples.append(gradient.flatten()[::stride].float().clone())
        weight.grad = None
    return Outcome(logprobs.detach(), value.detach(), tuple(samples))


def _compare(expected: Outcome, found: Outcome, mask: Bool[Tensor, "B T"], rounding: tuple[float, float]) -> None:
    tokens = float((expected.logprobs - found.logprobs)[mask].abs().mean())
    loss = float((expected.loss - found.loss).abs() / expected.loss.abs().clamp(min=1.0))
    ours, theirs = torch.cat(found.gradients), torch.cat(expected.gradients)
    gradient = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
    if not (max(tokens, loss) <= rounding[0] and gradient <= rounding[1]):
        raise UserError(
            "train.shared_prefix or train.padding_free does not give what padded rows give for this model: "
            f"log-probabilities differ by {tokens:.2g} in the mean, the loss by {loss:.2g} and the gradient by "
            f"{gradient:.2g} of its norm, where {rounding[0]:g} and {rounding[1]:g} may be rounding; set both to false"
        )
