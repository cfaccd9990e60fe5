"""Losses: against an explicit loop with gradients worked out by hand, and what must not change the result."""

from __future__ import annotations

import math
from dataclasses import replace

import made
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import completions, plain_batch

from grpo_cli.config.choices import choices
from grpo_cli.learner.batch import rows_of, tokens_of
from grpo_cli.rules import loss
from grpo_cli.types import Batch, Totals

LOSSES = [name for name in choices("loss") if isinstance(made.loss(name), loss.Clipped)]
PLAIN = {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0, "aggregation": "sequence"}


def random_batch(seed: int, rows: int = 5, width: int = 6, spread: float = 0.4) -> tuple[torch.Tensor, Batch, Totals]:
    """Random log-probabilities and a batch with holes in its mask; the last row has nothing to train on."""
    g = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(rows, width, generator=g) * 3
    mask = torch.rand(rows, width, generator=g) < 0.7
    mask[0, 0], mask[-1] = True, False
    batch = plain_batch(
        mask,
        advantages=torch.randn(rows, generator=g),
        weights=torch.rand(rows, width, generator=g) * 1.5,
        old_logprobs=logprobs + spread * torch.randn(rows, width, generator=g),
        ref_logprobs=logprobs + spread * torch.randn(rows, width, generator=g),
    )
    return logprobs[completions(mask)], batch, Totals(rows, int(mask.sum()), 9)


def run(name: str, logprobs: torch.Tensor, batch: Batch, totals: Totals, **settings):
    """Loss, its gradient with respect to the log-probabilities, and the metrics."""
    leaf = logprobs.clone().requires_grad_()
    output = made.loss(name, **(PLAIN | settings))(leaf, batch, totals)
    output.loss.backward()
    return float(output.loss.detach()), leaf.grad, {name: float(value) for name, value in output.metrics.items()}


def oracle(variant, logprobs, batch, totals, clip_low, clip_high, kl_coef, aggregation):
    """Loss, gradient and metrics by loops over plain numbers, the gradient from the formulas by hand."""
    total, gradient = 0.0, [0.0] * len(logprobs)
    metrics = dict.fromkeys(("loss/policy", "loss/kl", "loss/clip_fraction", "loss/policy_ratio_mean"), 0.0)
    for row in range(len(batch)):
        tokens = [t for t in tokens_of(batch, torch.tensor([row])).tolist() if batch.loss_mask[t]]
        counted = {"sequence": len(tokens) * totals.sequences, "token": totals.tokens}
        share = 1 / counted.get(aggregation, totals.sequences * totals.max_new_tokens) if tokens else 0.0
        differences = {t: float(logprobs[t] - batch.old_logprobs[t]) for t in tokens}
        low, high = clip_low, clip_high
        if variant == "echo" and tokens:
            certain = sum(math.exp(float(batch.old_logprobs[t])) for t in tokens) / len(tokens)  # fewer than 16
            low = high = clip_low + (clip_high - clip_low) / (1 + math.exp(-4 * (1 - certain)))
            metrics["loss/clip_mean"] = metrics.get("loss/clip_mean", 0.0) + low * len(tokens) / totals.tokens
        far = [t for t in tokens if variant == "mu_grpo" and abs(differences[t]) > math.log(2.0)]
        for t in tokens:
            advantage = float(batch.advantages[t])
            ratio = math.exp(sum(differences.values()) / len(tokens) if variant == "gspo" else differences[t])
            bounded = min(max(ratio, 1 - low), 1 + high)
            if variant == "cispo":
                value, slope = -bounded * advantage * float(logprobs[t]), -bounded * advantage
                clipped = bounded != ratio
            else:
                clipped = bounded * advantage < ratio * advantage
                value = -min(ratio * advantage, bounded * advantage)
                if far and t > far[0] and advantage < 0:
                    value, clipped = 0.0, True
                slope = 0.0 if clipped else -ratio * advantage
            behind = float(batch.ref_logprobs[t] - logprobs[t])
            weight, kl = float(batch.weights[t]), math.exp(behind) - behind - 1
            total += share * (weight * value + kl_coef * kl)
            gradient[t] = share * (weight * slope + kl_coef * (1 - math.exp(behind)))
            metrics["loss/policy"] += share * weight * value
            metrics["loss/kl"] += share * kl
            metrics["loss/clip_fraction"] += clipped / totals.tokens
            metrics["loss/policy_ratio_mean"] += ratio / totals.tokens
    return total, torch.tensor(gradient), metrics


@pytest.mark.parametrize("aggregation", loss.AGGREGATIONS)
@pytest.mark.parametrize("variant", LOSSES)
@pytest.mark.parametrize("seed", range(2))
def test_loss_gradient_and_metrics_are_those_of_a_plain_loop(variant, aggregation, seed):
    logprobs, batch, totals = random_batch(seed, rows=12)
    chosen = {"clip_low": 0.1, "clip_high": 0.15, "kl_coef": 0.3, "aggregation": aggregation}
    value, gradient, metrics = run(variant, logprobs, batch, totals, **chosen)
    expected, expected_gradient, expected_metrics = oracle(variant, logprobs, batch, totals, **chosen)
    assert value == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)
    assert metrics == pytest.approx(expected_metrics, abs=1e-5)
    assert 0 < metrics["loss/clip_fraction"] < 1, "the case has clipped tokens and others"


def test_grpo_by_hand():
    """Two sequences: ratios 1.5 (clipped to 1.2, advantage 1) and 0.5, then 0.5 (clipped to 0.8, advantage -2)."""
    half, more = math.log(0.5), math.log(1.5)
    batch = plain_batch([[1, 1], [1, 0]], advantages=torch.tensor([1.0, -2.0]), old_logprobs=torch.zeros(2, 2))
    logprobs = torch.tensor([more, half, half])
    value, gradient, metrics = run("grpo", logprobs, batch, Totals(2, 3, 4), clip_high=0.2)
    # sequence 1: -(1.2 + 0.5) / 2 = -0.85; sequence 2: -min(0.5 * -2, 0.8 * -2) = 1.6; mean 0.375
    assert value == pytest.approx(0.375)
    assert gradient.tolist() == pytest.approx([0, -0.5 / 2 / 2, 0])
    assert metrics["loss/clip_fraction"] == pytest.approx(2 / 3)
    assert metrics["loss/policy_ratio_mean"] == pytest.approx(2.5 / 3)
    token = run("grpo", logprobs, batch, Totals(2, 3, 4), clip_high=0.2, aggregation="token")[0]
    constant = run("grpo", logprobs, batch, Totals(2, 3, 4), clip_high=0.2, aggregation="constant")[0]
    assert token == pytest.approx((-1.7 + 1.6) / 3) and constant == pytest.approx((-1.7 + 1.6) / 8)


def test_a_token_that_a_correction_took_away_is_in_no_mean_and_one_of_weight_0_is_not_clipped():
    """Ratios 2 and 8, of which the first alone is in the loss; and twice 2, clipped at 1.28."""
    old = torch.tensor([[-math.log(2.0), -math.log(8.0)]])
    batch = plain_batch([[1, 1]], loss_mask=torch.tensor([[True, False]]), old_logprobs=old)
    for name in ("grpo", "gspo"):
        value, _, metrics = run(name, torch.zeros(2), batch, Totals(1, 1, 4), clip_high=9.0)
        assert value == pytest.approx(-2.0) and metrics["loss/policy_ratio_mean"] == pytest.approx(2.0)
    batch = plain_batch([[1, 1]], weights=torch.tensor([[0.0, 1.0]]), old_logprobs=old[:, :1].expand(1, 2))
    assert run("grpo", torch.zeros(2), batch, Totals(1, 2, 4))[2]["loss/clip_fraction"] == 0.5


@pytest.mark.parametrize("name", LOSSES)
def test_without_policy_logprobs_the_learner_is_the_old_policy(name):
    logprobs, batch, totals = random_batch(0)
    batch = replace(batch, ref_logprobs=None)
    implied = run(name, logprobs, replace(batch, old_logprobs=None), totals)
    given_ones = run(name, logprobs, replace(batch, old_logprobs=logprobs.clone()), totals)
    assert implied[0] == given_ones[0] and torch.equal(implied[1], given_ones[1])
    # the policy-gradient estimate: -A w per token, whatever the variant
    shares = batch.loss_mask / batch.per_token(batch.sums(batch.loss_mask)).clamp(min=1) / totals.sequences
    torch.testing.assert_close(implied[1], -shares * batch.weights * batch.advantages)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    cuts=st.sets(st.integers(1, 4)),
    name=st.sampled_from(LOSSES),
    aggregation=st.sampled_from(loss.AGGREGATIONS),
)
def test_shares_of_micro_batches_add_up(seed, cuts, name, aggregation):
    logprobs, batch, totals = random_batch(seed)
    words = {"kl_coef": 0.1, "aggregation": aggregation}
    whole = run(name, logprobs, batch, totals, **words)
    parts = []
    for rows in torch.arange(5).tensor_split(sorted(cuts)):
        parts.append(run(name, logprobs[tokens_of(batch, rows)], rows_of(batch, rows), totals, **words))
    assert sum(part[0] for part in parts) == pytest.approx(whole[0], abs=1e-5)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), whole[1])
    for metric, value in whole[2].items():
        assert sum(part[2][metric] for part in parts) == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("aggregation", loss.AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_leaks_from_outside_the_mask_and_an_empty_batch_is_zero(name, aggregation):
    """Tokens that are not trained on may be NaN or infinite."""
    logprobs, batch, totals = random_batch(1)
    words = {"kl_coef": 0.1, "aggregation": aggregation}
    expected = run(name, logprobs, batch, totals, **words)
    outside = ~batch.loss_mask
    assert outside.any()
    rubbish = {key: getattr(batch, key).masked_fill(outside, bad) for key, bad in
               (("old_logprobs", math.nan), ("ref_logprobs", -math.inf))}  # fmt: skip
    found = run(name, logprobs.masked_fill(outside, math.inf), replace(batch, **rubbish), totals, **words)
    assert found[0] == expected[0] and found[2] == expected[2] and torch.equal(found[1], expected[1])
    nothing = replace(batch, loss_mask=torch.zeros_like(outside))
    value, gradient, _ = run(name, logprobs, nothing, Totals(0, 0, 2), **words)
    assert value == 0 and not gradient.any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("jump", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_policy_far_away_still_has_a_finite_loss_and_gradient(name, jump, advantage):
    """exp(200) overflows float32, and a zero advantage times infinity is no number."""
    batch = plain_batch([[1, 1]], advantages=torch.tensor([advantage]), old_logprobs=torch.full((1, 2), -300.0))
    batch = replace(batch, ref_logprobs=torch.full((2,), -300.0 - jump))
    value, gradient, metrics = run(name, torch.full((2,), -300.0 + jump), batch, Totals(1, 2, 2), kl_coef=0.1)
    assert math.isfinite(value) and gradient.isfinite().all() and all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize("name", LOSSES)
def test_rollouts_without_an_advantage_have_no_gradient_unless_there_is_a_kl_term(name):
    logprobs, batch, totals = random_batch(3)
    batch = replace(batch, advantages=0 * batch.advantages)
    for kl in (0.0, 1e-9, 1.0):
        part = made.loss(name, kl_coef=kl)
        assert (part.needs_reference, part.needs_advantage) == (kl > 0, kl == 0)
        assert bool(run(name, logprobs, batch, totals, kl_coef=kl)[1].any()) == (kl > 0)


def test_a_divergence_is_exact_near_0_and_never_pushes_away_from_the_reference():
    learner = torch.tensor([-3e-8, 3e-8, -1e-4, -25.0, 0.0], requires_grad=True)
    found = loss.k3(learner, torch.tensor([0.0, 0.0, 0.0, 0.0, -25.0]), torch.ones(5, dtype=torch.bool))
    assert found.tolist() == pytest.approx([0, 0, 5e-9, math.exp(20) - 21, math.exp(-20) + 24], rel=1e-2, abs=1e-14)
    found.sum().backward()
    assert learner.grad is not None and learner.grad[3] == 0 < learner.grad[4]
