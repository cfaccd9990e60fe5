"""Log-probabilities and advantages to a scalar and its metrics: GRPO and the losses that differ from it by one idea.

Each variant says what a token contributes; masking, mismatch weights, KL, averaging and metrics are shared. The clip
acts on `policy_ratio` (learner / old policy) only: the mismatch weight in `batch.weights` multiplies the clipped term
from outside, without gradient, and does not touch the KL term. Divisors come from `Totals`, so a micro-batch yields its
share of the loss and of each metric, and shares add up. All is computed in float32, whatever the model's precision.

`aggregation` is how tokens are averaged:
  sequence   mean over the tokens of a sequence, then over sequences (GRPO as published; TRL's `grpo`);
  token      mean over all tokens (DAPO): long completions count more;
  constant   sum over sequences * max_new_tokens (Dr. GRPO, arXiv 2503.20783): no division by the length at all.
A sequence without a token left to train on adds nothing; the divisors of `sequence` and `constant` still count it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_cli.errors import UserError
from grpo_cli.types import Batch, LossOutput, Totals

AGGREGATIONS = ("sequence", "token", "constant")

# Beyond exp(20) a ratio means nothing, and one that overflows would turn a zero advantage into NaN.
_MAX_LOG_RATIO = 20.0


def grpo(
    logprobs: Float[Tensor, "B T"],
    batch: Batch,
    totals: Totals,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    aggregation: str,
) -> LossOutput:
    """Per token -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (GRPO, arXiv 2402.03300, with PPO's clip).

    Published settings: clip_low 0.2, clip_high 0.2, kl_coef 0.04, aggregation sequence. With one update per generation
    rho is 1 with a gradient, and the clip never acts.
    """
    _check(clip_low, clip_high, kl_coef, aggregation)
    ratio = _ratio(_log_policy_ratio(logprobs, batch))
    terms, clipped = _clipped_terms(ratio, batch.advantages, clip_low, clip_high)
    return _output(terms, ratio, clipped, logprobs, batch, totals, kl_coef, aggregation)


def dapo(
    logprobs: Float[Tensor, "B T"],
    batch: Batch,
    totals: Totals,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    aggregation: str,
) -> LossOutput:
    """GRPO's loss by DAPO's settings (arXiv 2503.14476): the formula is the same, the numbers are not.

    Published settings: clip_low 0.2, clip_high 0.28 (room for unlikely tokens to grow), kl_coef 0, aggregation token.
    DAPO's dynamic sampling and overlong reward are no part of a loss.
    """
    return grpo(
        logprobs,
        batch,
        totals,
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coef=kl_coef,
        aggregation=aggregation,
    )


def gspo(
    logprobs: Float[Tensor, "B T"],
    batch: Batch,
    totals: Totals,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    aggregation: str,
) -> LossOutput:
    """GRPO with one ratio per sequence, the geometric mean over its trained tokens (GSPO, arXiv 2507.18071).

    Each token carries the sequence's ratio in value and its own log-probability in gradient (the paper's GSPO-token
    form), so that per-token weights still act per token; unweighted, its gradient is that of the sequence form. The
    clip is all-or-nothing for a sequence. Published settings: clip_low 3e-4, clip_high 4e-4, kl_coef 0, aggregation
    sequence: sequence ratios stay much nearer to 1 than token ratios.
    """
    _check(clip_low, clip_high, kl_coef, aggregation)
    log_ratio = _log_policy_ratio(logprobs, batch)
    num_tokens = batch.loss_mask.sum(dim=1, keepdim=True).clamp(min=1)
    sequence_log_ratio = log_ratio.detach().sum(dim=1, keepdim=True) / num_tokens
    ratio = _ratio(sequence_log_ratio + (log_ratio - log_ratio.detach()))
    terms, clipped = _clipped_terms(ratio, batch.advantages, clip_low, clip_high)
    return _output(terms, ratio, clipped, logprobs, batch, totals, kl_coef, aggregation)


def cispo(
    logprobs: Float[Tensor, "B T"],
    batch: Batch,
    totals: Totals,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    aggregation: str,
) -> LossOutput:
    """Per token -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi (CISPO, MiniMax-M1, arXiv 2506.13585).

    A clipped token keeps a gradient, of bounded weight, where the other losses drop it. Published settings: no lower
    bound (clip_low 1.0), kl_coef 0, aggregation token; the upper bound is not in the paper, ScaleRL (arXiv 2510.13786)
    uses rho <= 5, that is clip_high 4.0. Its value is no measure of progress: it contains log pi itself.
    """
    _check(clip_low, clip_high, kl_coef, aggregation)
    ratio = _ratio(_log_policy_ratio(logprobs, batch)).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = -weight * batch.advantages.float()[:, None] * _masked(logprobs, batch.loss_mask)
    return _output(terms, ratio, weight != ratio, logprobs, batch, totals, kl_coef, aggregation)


def aggregate(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], totals: Totals, aggregation: str
) -> Float[Tensor, ""]:
    """This batch's share of the mean of `values` over the tokens in `mask` (see the module for the three means)."""
    masked = values.masked_fill(~mask, 0.0)
    if aggregation == "sequence":
        means = masked.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return means.sum() / max(totals.sequences, 1)
    if aggregation == "token":
        return masked.sum() / max(totals.tokens, 1)
    return masked.sum() / max(totals.sequences * totals.max_new_tokens, 1)


def _output(
    terms: Float[Tensor, "B T"],
    ratio: Float[Tensor, "B T"],
    clipped: Bool[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    batch: Batch,
    totals: Totals,
    kl_coef: float,
    aggregation: str,
) -> LossOutput:
    """Weights, KL, averages and metrics: what every variant does with its per-token terms.

    Metrics are detached tensors, so nothing waits for the device. The clip fraction and the ratio are means over tokens
    whatever the aggregation; `loss/kl` is the KL itself, not multiplied by `kl_coef`, and there only with a reference.
    """
    mask = batch.loss_mask
    loss = policy = aggregate(terms * batch.weights.detach().float(), mask, totals, aggregation)
    metrics = {
        "loss/policy": policy.detach(),
        "loss/clip_fraction": aggregate(clipped.float(), mask, totals, "token"),
        "loss/policy_ratio_mean": aggregate(ratio.detach(), mask, totals, "token"),
    }
    assert batch.ref_logprobs is not None or kl_coef == 0, "a KL term was asked for without reference log-probabilities"
    if batch.ref_logprobs is not None:
        kl = aggregate(_k3(logprobs, batch.ref_logprobs, mask), mask, totals, aggregation)
        metrics["loss/kl"] = kl.detach()
        if kl_coef:
            loss = policy + kl_coef * kl
    return LossOutput(loss, metrics)


def _clipped_terms(
    ratio: Float[Tensor, "B T"], advantages: Float[Tensor, " B"], clip_low: float, clip_high: float
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """PPO's pessimistic terms, and where the clip takes the gradient away."""
    advantage = advantages.float()[:, None]
    terms = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    clipped = ((ratio > 1 + clip_high) & (advantage > 0)) | ((ratio < 1 - clip_low) & (advantage < 0))
    return terms, clipped


def _log_policy_ratio(logprobs: Float[Tensor, "B T"], batch: Batch) -> Float[Tensor, "B T"]:
    """log(learner / old policy), 0 outside the loss mask; the learner itself is the old policy until it has moved."""
    learner = _masked(logprobs, batch.loss_mask)
    if batch.policy_logprobs is None:
        return learner - learner.detach()
    return learner - _masked(batch.policy_logprobs, batch.loss_mask).detach()


def _k3(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Schulman's k3 estimator of KL(learner || reference): exp(d) - d - 1 >= 0 with d = log(reference / learner)."""
    difference = _masked(ref_logprobs, mask).detach() - _masked(logprobs, mask)
    return _ratio(difference) - difference - 1


def _ratio(log_ratio: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _masked(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """In float32, 0 outside the mask before anything is computed: what padding holds (-inf, NaN) cannot leak."""
    return values.float().masked_fill(~mask, 0.0)


def _check(clip_low: float, clip_high: float, kl_coef: float, aggregation: str) -> None:
    problems = []
    if not 0 <= clip_low <= 1:
        problems.append(f"loss.clip_low={clip_low} must be between 0 and 1 (1 is no lower bound)")
    if not clip_high >= 0:
        problems.append(f"loss.clip_high={clip_high} must not be negative")
    if not kl_coef >= 0:
        problems.append(f"loss.kl_coef={kl_coef} must not be negative (0 is no KL term)")
    if aggregation not in AGGREGATIONS:
        problems.append(f"loss.aggregation={aggregation} is unknown: use {', '.join(AGGREGATIONS)}")
    if problems:
        raise UserError("\n".join(problems))
