"""Mismatch correction: weights, rejections and metrics by hand, and the identities they obey."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import made
import pytest
import torch
from small import completions, plain_batch

from grpo_cli.config.choices import choices
from grpo_cli.interfaces import Correction
from grpo_cli.support.errors import UserError

PRESETS = {name: made.correction(name) for name in choices("correction")}
WEIGHTLESS = ("none",)  # which measures xi and does nothing about it


def asked(part: Correction, sampler: torch.Tensor, policy: torch.Tensor, mask: torch.Tensor) -> Any:
    """Its verdict, with weights and mask as tables; no rollout is better than others."""
    batch, own = plain_batch(mask, sampler_logprobs=sampler), completions(mask)
    verdict = part(batch, policy[own])
    weights, kept = torch.zeros(mask.shape), torch.zeros(mask.shape, dtype=torch.bool)
    weights[own], kept[own] = verdict.weights, verdict.mask
    return SimpleNamespace(weights=weights, mask=kept, reasons=verdict.reasons, metrics=verdict.metrics)


def apply(part: Correction, xi: list[list[float]], mask: list[list[int]] | None = None):
    """Weights, mask and metrics for given ratios; where the mask is 0 the log-probabilities are garbage."""
    ratios = torch.tensor(xi, dtype=torch.float64)
    valid = torch.ones_like(ratios) if mask is None else torch.tensor(mask)
    sampler = torch.full_like(ratios, -2.0).float()
    policy = (sampler + ratios.log()).float()
    garbage = valid == 0
    verdict = asked(part, sampler.masked_fill(garbage, math.nan), policy.masked_fill(garbage, -math.inf), ~garbage)
    return verdict.weights.tolist(), verdict.mask.int().tolist(), verdict.metrics


def close(values):
    return pytest.approx(values, rel=1e-5, abs=1e-7)


def test_nothing_is_corrected_by_default_and_everything_is_measured():
    weights, kept, metrics = apply(made.correction(), [[0.5, 2.0, 1e-6], [1.0, 1.0, 9.0]], [[1, 1, 1], [1, 1, 0]])
    assert weights == [[1, 1, 1], [1, 1, 0]] and kept == [[1, 1, 1], [1, 1, 0]]
    xi = [0.5, 2.0, 1e-6, 1.0, 1.0]
    assert metrics["mismatch/ratio_mean"] == close(sum(xi) / 5)
    assert metrics["mismatch/ratio_min"] == close(1e-6)
    assert metrics["mismatch/kl"] == close(sum(x - 1 - math.log(x) for x in xi) / 5)
    assert metrics["mismatch/rejected"] == 0 and metrics["mismatch/masked_tokens"] == 0
    assert metrics["mismatch/weight_mean"] == 1
    assert not made.correction().needs_old_logprobs


def test_sequence_weights_are_the_product_of_the_ratios():
    part = made.correction(importance="sequence", is_threshold=3.0)
    weights, _, _ = apply(part, [[0.5, 3.0, 7.0], [2.0, 2.0, 1.0]], [[1, 1, 0], [1, 1, 1]])
    assert weights[0] == close([1.5, 1.5, 0]) and weights[1] == close([3, 3, 3])
    masked = apply(replace(part, is_mode="mask"), [[0.5, 3.0], [2.0, 2.0]])
    assert masked[0][0] == close([1.5, 1.5]) and masked[0][1] == [0, 0]
    assert masked[2]["mismatch/rejected"] == 0.5


def test_one_impossible_token_vetoes_its_sequence_and_no_other():
    part = made.correction(rejection="veto", veto=1e-4)
    xi = [[1.0, 0.9e-4, 1.0], [1.0, 1.1e-4, 1.0], [1.0, 1.0, 1e-9]]
    weights, kept, metrics = apply(part, xi, [[1, 1, 1], [1, 1, 1], [1, 1, 0]])  # the third's lies in the padding
    assert kept == [[0, 0, 0], [1, 1, 1], [1, 1, 0]]
    assert weights == [[0, 0, 0], [1, 1, 1], [1, 1, 0]]
    assert metrics["mismatch/rejected"] == close(1 / 3) and metrics["mismatch/masked_tokens"] == close(3 / 8)
    # A bound on xi for the sake of its weight, of exp(-20), must not hide a token of xi = e**-30.
    xi = [[math.exp(-30.0)], [math.exp(-25.0)]]
    assert apply(replace(part, veto=1e-12), xi)[1] == [[0], [1]]
    assert apply(made.correction(), [[0.0], *xi])[:2] == ([[1]] * 3, [[1]] * 3)  # without a veto no token is impossible


def test_the_release_normalises_before_it_rejects():
    """Truncated weights 1.0 1.5 1e-6, 0.4 1.2 1.4 have mean 5.5 / 6, vetoed and masked ones included."""
    weights, kept, metrics = apply(PRESETS["sparse_rl_release"], [[1.0, 3.0, 1e-6], [0.4, 1.2, 1.4]])
    assert kept == [[0, 0, 0], [0, 1, 1]]
    mean = (1.0 + 1.5 + 1e-6 + 0.4 + 1.2 + 1.4) / 6
    assert weights[0] == [0, 0, 0] and weights[1] == close([0, 1.2 / mean, 1.4 / mean])
    assert metrics["mismatch/rejected"] == 0.5 and metrics["mismatch/weight_mean"] == close(1.3 / mean)


def test_batch_normalised_weights_have_mean_one():
    part = made.correction(importance="token", is_threshold=2.0, batch_normalise=True)
    metrics = apply(part, [[0.1, 0.7, 5.0], [1.0, 0.9, 0.3]], [[1, 1, 1], [1, 1, 0]])[2]
    assert metrics["mismatch/weight_mean"] == close(1)
    weights = apply(replace(part, importance="sequence"), [[0.5, 1.0, 1.0], [1.5, 1.0, 9.0]], [[1, 1, 1], [1, 1, 0]])[0]
    assert weights[0] == close([0.5] * 3) and weights[1] == close([1.5, 1.5, 0])  # mean of sequences, not of tokens
    assert apply(replace(part, is_mode="mask", is_threshold=0.01), [[1.0, 2.0]])[0] == [[0, 0]]


@pytest.mark.parametrize("name", PRESETS)
def test_without_a_mismatch_no_preset_changes_anything(name):
    part = PRESETS[name]
    weights, kept, metrics = apply(part, [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [[1, 1, 1], [1, 0, 0]])
    assert weights == [[1, 1, 1], [1, 0, 0]] and kept == [[1, 1, 1], [1, 0, 0]]
    ones = {f"mismatch/{name}" for name in ("ratio_mean", "ratio_min", "weight_mean")}
    assert metrics == {name: name in ones for name in metrics}
    assert part.needs_old_logprobs == (name not in WEIGHTLESS) and isinstance(part, Correction)


def test_quantiles_are_over_response_tokens():
    """1001 tokens, log xi = 0, -1, ... -1000 percent: the 0.1 % quantile is the second smallest, 1 % the eleventh."""
    log_ratio = -torch.arange(1001, dtype=torch.float32)[None] / 100
    padded = torch.cat([log_ratio, torch.full((1, 50), -99.0)], dim=1)
    mask = torch.arange(1051)[None] < 1001
    metrics = asked(made.correction(), torch.zeros(1, 1051), padded, mask).metrics
    assert metrics["mismatch/log_ratio_q001"] == close(-9.99)
    assert metrics["mismatch/log_ratio_q01"] == close(-9.90)


@pytest.mark.parametrize("name", PRESETS)
def test_log_probabilities_that_are_no_numbers_are_not_masked_away(name):
    """Of the sampler they are refused; a policy's would hide a broken model from the guard against bad steps."""
    with pytest.raises(UserError, match="no finite sampler log-probability for 1 of 3"):
        sampler = torch.tensor([[-1.0, math.nan, -1.0]])
        asked(PRESETS[name], sampler, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool))
    policy, mask = torch.tensor([[-1.0, math.nan]]), torch.ones(1, 2, dtype=torch.bool)
    verdict = asked(PRESETS[name], torch.full((1, 2), -1.0), policy, mask)
    assert verdict.mask.all() and (name in WEIGHTLESS or verdict.weights.isnan().any())


def test_each_row_has_the_reason_for_its_rejection():
    log_ratio = torch.tensor([[1.0, 1.0], [1.0, 1e-6], [0.1, 9.0], [1.0, 1.0], [0.6, 0.6]]).log()
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0], [1, 1]]).bool()
    weighted = made.correction(importance="sequence", is_threshold=2.0, is_threshold_low=0.5, is_mode="mask")
    part = replace(weighted, rejection="veto", mask_low=0.5, mask_high=1.5)
    verdict = asked(part, torch.zeros(5, 2), log_ratio, mask)
    assert [why.partition(":")[0] for why in verdict.reasons] == ["", "veto", "mask", "empty", "importance"]
    assert [bool(row.any()) for row in verdict.weights] == [reason == "" for reason in verdict.reasons]
    assert verdict.metrics["mismatch/rejected"] == close(3 / 4)
