"""Shadow masks: the learner sees what the sampler saw, and what it would say if it saw all is its teacher (Shadow Mask
Distillation, arXiv 2605.06850).

    pi(o_t | M_t) in place of pi(o_t | all) in every term of the loss, with M_t the keys that the sampler's token t saw:
    pi / sampler is 1 until the weights move
    loss + distill * mean over tokens of (exp(d) - d - 1),  d = log pi_old(o_t | all) - log pi(o_t | M_t)

Only the paper's abstract and summaries could be read, not its formulas: that the learner is given the sampler's sparse
context by a mask, and that a teacher with the full context is distilled into it. A note we found says that the paper
was withdrawn for errors in its experiments. Ours: masks for each layer and key-value head, and so any eviction; the
teacher is the policy of the step's start, without gradient; the divergence is KL(student || teacher), estimated from
the drawn tokens (k3), so that no distribution is stored; its weight.

It costs a pass of padded rows with the scores of all pairs of tokens, and with distill > 0 another pass that sees all.
Evaluation sees all: what is trained is the model under eviction.

Measured: scripts/reproduce/rivals.md (no difference from `sparse_rl` seen, in longer steps; embedded model).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_cli.rules.correction import Prox, Window, check_sampler, log_sparsity_ratio, mismatch_metrics
from grpo_cli.rules.loss import aggregate, k3
from grpo_cli.support.facts import Others, facts
from grpo_cli.support.ranges import Range
from grpo_cli.types import Batch, LossOutput, Totals, Verdict


def _goes_with(own: Mapping[str, Any], others: Others) -> Iterator[str]:
    name = others.named("correction")
    if not others.says("sparsity", "evicts"):
        yield (
            f"{name} hides from the learner what was evicted, and {others.named('sparsity')} evicts nothing: use "
            "correction=none, or sparsity=rkv"
        )
    if others.says("engine", "views") is not True:
        yield (
            f"{name} needs an engine that records what it evicts, which {others.named('engine')} does not: use "
            "engine=torch, or correction=sparse_rl"
        )
    if others.says("replay", "replays"):
        yield (
            f"{name} needs to know what each token saw, which {others.named('replay')} does not store: use "
            "replay=none, or correction=sparse_rl"
        )
    if others.setting("collector", "hold") is True:
        yield (
            f"{name} needs to know what each token saw, which is not stored with the groups that "
            f"{others.named('collector')} holds for the next step: use collector.hold=false, or correction=sparse_rl"
        )


@facts(same_view=True, goes_with=_goes_with)
@dataclass(frozen=True)
class Shadow:
    """The learner's passes hide the keys that were evicted before a token was drawn, so that there is nothing to
    correct: all weights are 1. `distill` weighs the divergence to the policy that sees all (arXiv 2605.06850)."""

    distill: Annotated[float | int, Range(0, because="0 has no teacher, and makes no pass for it")]
    prox: Prox
    prox_window: Window

    needs_policy_logprobs = False
    rejects = False
    count_rejected = True

    @property
    def needs_dense(self) -> bool:
        return self.distill > 0

    def __call__(
        self,
        sampler_logprobs: Float[Tensor, "B T"],
        policy_logprobs: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
    ) -> Verdict:
        """As `Correct` with no importance and no rejection; the mismatch is that of the policy under the same view."""
        check_sampler(sampler_logprobs, mask)
        weights = mask.float()
        reasons = tuple("" if some else "empty: no response token" for some in mask.any(dim=1).tolist())
        log_ratio = log_sparsity_ratio(sampler_logprobs, policy_logprobs, mask)
        return Verdict(weights, mask, reasons, mismatch_metrics(log_ratio, weights, mask, mask))

    def term(self, logprobs: Float[Tensor, "B T"], batch: Batch, totals: Totals) -> LossOutput:
        """The mean over trained tokens, times `distill`; 0 where nothing was evicted. `loss/distill` is without it."""
        if batch.dense_logprobs is None:
            nothing = torch.zeros((), device=logprobs.device)
            return LossOutput(nothing, {"loss/distill": nothing} if self.needs_dense else {})
        mask = batch.loss_mask
        divergence = aggregate(k3(logprobs, batch.dense_logprobs, mask), mask, totals, "token")
        return LossOutput(self.distill * divergence, {"loss/distill": divergence.detach()})
