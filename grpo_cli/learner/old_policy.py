"""The old policy, from which the clip measures how far the learner has moved: three kinds (`correction.prox`).

The ratio of the learner to the sampler is a product: old policy / sampler, which the correction handles, and learner /
old policy, which the loss clips. `step_start` puts the border at the start of the step, `sampler` at the sampler,
and `ewma` at an average of the weights so far (PPO-EWMA, arXiv 2110.00641). They differ for old rollouts (arXiv
2605.12070)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.history import of_kind
from grpo_cli.interfaces import Correction
from grpo_cli.learner.learner import Learner
from grpo_cli.settings import TrainSettings
from grpo_cli.support.errors import UserError
from grpo_cli.types import GIVEN, Batch

ACTIVE_LEAST = 0.9  # if a smaller share of tokens than this teaches, the average lags too far behind and is reset
_GROUP = "correction.prox"


class OldPolicy:
    """The learner as of the start of the step, of which nothing is kept from step to step."""

    kind: ClassVar[str] = "step_start"

    def __init__(self, model: Any, learner: Learner) -> None:
        self._model, self._learner = model, learner

    @property
    def differs(self) -> bool:
        """True if it differs from the learner at the start of the step, and so must be computed before an update."""
        return False

    def logprobs(self, batch: Batch) -> Float[Tensor, "N"]:
        """Return those of the batch's response tokens, on the CPU, without gradient. Called before the step's first
        update."""
        return self._learner.logprobs(self._model, batch)

    def after_update(self) -> None:
        """Take in an optimizer step, which was just made."""

    def end_step(self, active: float) -> Mapping[str, float]:
        """Finish a step that moved the weights; `active` is the share of its tokens that were neither masked nor
        clipped. Return metrics by their full names."""
        return {}

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return plain values and tensors, which change with the next update; None: nothing to keep."""
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned. UserError if the checkpoint is that of another kind."""
        if state is not None:
            of_kind(state, _GROUP, self.kind)


def old_policy(prox: str, window: float | int, model: Any, learner: Learner) -> OldPolicy:
    """Return the old policy of `correction.prox` and `correction.prox_window`."""
    if prox == "ewma":
        return AveragedPolicy(model, learner, window)
    return (SamplerPolicy if prox == "sampler" else OldPolicy)(model, learner)


def is_needed_first(correction: Correction, train: TrainSettings, has_dropout: bool) -> bool:
    """True if updates need its log-probabilities before them. With one update per step, and without dropout, the
    learner's own forward pass gives them, so that measuring the mismatch can wait for it."""
    return correction.needs_old_logprobs or train.epochs * train.minibatches > 1 or has_dropout


def average_bytes(weights: Sequence[Tensor], prox: str | None) -> int:
    """Return the bytes of the average of `weights` where there is one."""
    return sum(weight.nbytes for weight in weights) if prox == "ewma" else 0


class SamplerPolicy(OldPolicy):
    """The sampler itself, if it is the policy as of when it sampled: there is no extra pass, and the clip measures from
    the policy that sampled each token. The ratio that a correction sees is then 1 everywhere."""

    kind = "sampler"
    differs = True

    def logprobs(self, batch: Batch) -> Float[Tensor, "N"]:
        given = 0 if batch.token_ages is None else int((batch.token_ages == GIVEN).sum())
        if given:
            raise UserError(
                f"correction.prox=sampler takes the sampler for the old policy, but {given} tokens of the step were "
                "given and not sampled; use correction.prox=step_start"
            )
        return batch.sampler_logprobs

    def end_step(self, active: float) -> Mapping[str, float]:
        return {"off/active": active}


class AveragedPolicy(OldPolicy):
    """An average of the trained weights over updates, each of which counts beta = window / (window + 2) times the next.

    It is corrected for the bias of its start: after t updates since the start (or since a reset) it is
    (1 - beta) * sum of beta^(t - i) * weights after update i, divided by 1 - beta^t. Before the first it is the learner
    itself. It is kept on the weights' device; during its pass it takes their place. Frozen weights are not copied.
    """

    kind = "ewma"

    def __init__(self, model: Any, learner: Learner, window: float | int) -> None:
        super().__init__(model, learner)
        self._weights: list[Tensor] = [weight for weight in model.parameters() if weight.requires_grad]
        self._decay = window / (window + 2)
        self._average: list[Tensor] = []
        self._count = self._resets = 0

    @property
    def differs(self) -> bool:
        return self._count > 0

    def logprobs(self, batch: Batch) -> Float[Tensor, "N"]:
        own = [weight.data for weight in self._weights]
        try:
            for weight, average in zip(self._weights, self._average, strict=False):  # none before an update
                weight.data = average
            return super().logprobs(batch)
        finally:
            for weight, data in zip(self._weights, own, strict=True):
                weight.data = data

    @torch.no_grad()
    def after_update(self) -> None:
        self._count += 1
        if self._count == 1:
            self._average = [weight.detach().clone() for weight in self._weights]
            return
        # (1 - beta) / (1 - beta^t) of the way to the newest: the debiased average by steps, without a division.
        share = (1 - self._decay) / (1 - self._decay**self._count)
        for average, weight in zip(self._average, self._weights, strict=True):
            average.lerp_(weight.detach(), share)

    def end_step(self, active: float) -> Mapping[str, float]:
        if active < ACTIVE_LEAST:
            self._average, self._count = [], 0
            self._resets += 1
        return {"off/active": active, "off/prox_resets": float(self._resets)}

    def state_dict(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "count": self._count, "resets": self._resets, "average": list(self._average)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        state = of_kind(state, _GROUP, self.kind)
        shapes = [average.shape for average in state["average"]]
        if shapes and shapes != [weight.shape for weight in self._weights]:
            raise UserError(
                "the checkpoint's average of correction.prox=ewma is of other weights than those that are trained "
                "here; resume with the same model.lora, or start a new run"
            )
        self._average = [average.to(self._weights[0].device, copy=True) for average in state["average"]]
        self._count, self._resets = state["count"], state["resets"]
