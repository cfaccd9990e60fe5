"""The baseline of least variance for the gradient of a whole group (`optim.baseline=opob`, VCPO, arXiv 2602.17616).

    b = sum_i w_i^2 |g_i|^2 A_i / sum_i w_i^2 |g_i|^2        over the rollouts i of a group
    gradient = sum_i w_i g_i (A_i - b)

g_i is a rollout's own gradient and w_i the weight that the correction and the credit leave it, so that what moves the
weights most weighs most. Any advantage will do, since b moves with it. The loss has to be linear in the advantage, as
it is while the policy is the one that its ratios are measured from. In the released code the norms, which hold w
already, are multiplied by w^2 once more; the paper's formula is meant here.

Not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.interfaces import LossFn
from grpo_cli.learner.forward import prompt_groups, row_shapes
from grpo_cli.types import Batch, Totals


def one_by_one(batch: Batch) -> list[Tensor]:
    """Each row as a part of its own, those with the same prompt one after the other."""
    return [torch.tensor([row]) for rows in prompt_groups(row_shapes(batch, share=True), share=True) for row in rows]


class GroupBaseline:
    """Adds up what a step's rows would move: 3 copies of the gradient."""

    def __init__(self, weights: Sequence[Tensor], loss: LossFn, divisors: Totals) -> None:
        self._weights, self._loss, self._divisors = weights, loss, divisors
        self._group: object = None
        self._whole, self._first, self._second = ([torch.zeros_like(w) for w in weights] for _ in range(3))
        self._norms = self._weighed = self._baselines = torch.zeros((), dtype=torch.float64, device=weights[0].device)
        self._count = 0

    def add(self, values: Float[Tensor, "1 T"], row: Batch) -> None:
        """A row on the model's device, and its log-probabilities; rows of a group come one after the other."""
        (shape,) = row_shapes(row, share=True)
        if shape.group != self._group:
            self._close()
            self._group = shape.group
        advantage, unit = row.advantages[0], replace(row, advantages=torch.ones_like(row.advantages))
        self._loss(values, unit, self._divisors).loss.backward()
        grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in self._weights]
        norm = torch.stack([g.double().square().sum() for g in grads]).sum()
        self._norms, self._weighed = self._norms + norm, self._weighed + norm * advantage
        torch._foreach_add_(self._first, torch._foreach_mul(grads, advantage.to(grads[0].dtype)))
        torch._foreach_add_(self._second, grads)
        for weight in self._weights:
            weight.grad = None

    def _close(self) -> None:
        """The group's gradient joins the whole."""
        if self._group is None:
            return
        baseline = torch.where(self._norms > 0, self._weighed / self._norms, 0.0)
        torch._foreach_add_(self._whole, self._first)
        torch._foreach_sub_(self._whole, torch._foreach_mul(self._second, baseline.to(self._whole[0].dtype)))
        self._baselines, self._count = self._baselines + baseline, self._count + 1
        torch._foreach_zero_([*self._first, *self._second])
        self._norms, self._weighed = torch.zeros_like(self._norms), torch.zeros_like(self._weighed)

    def finish(self) -> Float[Tensor, ""]:
        """Give the weights their gradients; returns the mean baseline of the groups."""
        self._close()
        for weight, gradient in zip(self._weights, self._whole, strict=True):
            weight.grad = gradient
        return self._baselines / max(self._count, 1)
