"""Credits that read the policy (`credit=echo`, `credit=entropy`), and the clip of each reply's own (`loss=echo`)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import plain_batch, small_model
from test_config import refusal
from test_readout import credit
from test_train import NO_EXAM, make_trainer, records_of, settings_for

from grpo_cli.history import History
from grpo_cli.types import Batch, Readout, Totals

MASK = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]])
ENTROPIES = torch.tensor([[0, 0.1, 0.5, 0.3, 0], [0, 0, 0.9, 0.3, 0.3]])
PROBS = torch.tensor([[1, 0.9, 0.2, 0.5, 1], [1, 1, 0.1, 0.8, 0.5]])


def factors(choice: str, batch: Batch | None = None, entropies: torch.Tensor = ENTROPIES, **changed: Any) -> Any:
    batch = plain_batch(MASK) if batch is None else batch
    readout = Readout(PROBS[:, : entropies.shape[1]].log() * MASK, entropies)
    return credit(choice, **changed)(batch, ["a"] * len(batch), History(), readout)


# credit=echo


def test_a_token_counts_by_its_deviations_from_the_mean_token() -> None:
    found = factors("echo", amount=0.1)
    entropy, doubt = (np.array([values[r, c] for r, c in MASK.nonzero()]) for values in (ENTROPIES, 1 - PROBS))
    scores = sum((of - of.mean()) / of.std() for of in (entropy, doubt))
    assert scores.max() > 2 and scores.min() < -2, "both bounds act"
    wanted = 1 + 0.1 * np.clip(scores, -2, 2)
    assert found[MASK.bool()].numpy() == pytest.approx(wanted, abs=1e-6)
    assert factors("echo", amount=0.1, doubt=0.0)[MASK.bool()].numpy() == pytest.approx(
        1 + 0.1 * (entropy - entropy.mean()) / entropy.std(), abs=1e-6
    )


def test_alike_tokens_and_no_amount_count_alike() -> None:
    alike = factors("echo", entropies=0.1 * MASK, doubt=0.0)
    assert torch.equal(alike, torch.ones(2, 5)), "three times 0.1 have a deviation that is not 0 to the bit"
    assert torch.equal(factors("echo", amount=0.0), torch.ones(2, 5))


def test_a_run_in_which_the_credit_has_no_amount_is_a_plain_one(tmp_path: Path) -> None:
    settings = replace(settings_for(tmp_path, steps=2), eval=NO_EXAM)
    weights = []
    for parts in ({}, {"credit": credit("echo", amount=0.0)}):
        model = small_model()
        make_trainer(settings, model=model, **parts).fit()
        weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("choice", ["echo", "entropy"])
def test_micro_batches_change_nothing(tmp_path: Path, choice: str) -> None:
    weights = []
    for number, tokens in enumerate((10_000, 40)):
        settings = settings_for(tmp_path / str(number), steps=2, micro_batch_tokens=tokens)
        model = small_model()
        make_trainer(replace(settings, eval=NO_EXAM), model=model, credit=credit(choice)).fit()
        weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    torch.testing.assert_close(*weights, atol=2e-5, rtol=0)


# credit=entropy


def test_the_most_uncertain_fifth_counts_five_times() -> None:
    """Of 6 tokens a fifth is 2, rounded up: those of 0.9 and 0.5."""
    found = factors("entropy", keep=0.2)
    assert found.nonzero().tolist() == [[0, 2], [1, 2]] and set(found[found > 0].tolist()) == {5.0}
    assert torch.equal(factors("entropy", keep=1.0), MASK.float())


def test_of_equal_entropies_the_first_count() -> None:
    found = factors("entropy", entropies=0.3 * MASK, keep=0.5)
    assert found.nonzero().tolist() == [[0, 1], [0, 2], [0, 3]]
    many = torch.full((1, 5000), 0.3)
    chosen = credit("entropy", keep=0.5)(plain_batch(many > 0), ["a"], History(), Readout(-many, many))
    assert bool((chosen[0, :2500] == 2).all())


@given(st.integers(1, 40), st.floats(0.01, 1.0))
def test_the_share_is_rounded_up_and_the_likely_tokens_get_nothing(tokens: int, keep: float) -> None:
    entropies = torch.rand(1, tokens, generator=torch.Generator().manual_seed(tokens))
    batch = plain_batch(torch.ones(1, tokens))
    rule = credit("entropy", keep=keep)
    found = rule(batch, ["a"], History(), Readout(-entropies, entropies))
    count = int((found > 0).sum())
    assert count == math.ceil(keep * tokens)
    assert entropies[found > 0].min() >= entropies[found == 0].max() if count < tokens else True


# loss=echo

ECHO = made.loss("echo")


def away_of(probability: float, tokens: int = 20) -> float:
    """How far from 1 the ratios of a reply may be whose last 16 tokens the old policy gave this probability."""
    probs = torch.full((1, tokens), 0.5)
    probs[0, -16:] = probability
    batch = plain_batch(torch.ones(1, tokens), policy_logprobs=probs.log().clamp(min=-1e30))
    said = ECHO(batch.policy_logprobs.clone().requires_grad_(), batch, Totals(1, tokens, tokens))
    return float(said.metrics["loss/clip_mean"])


@pytest.mark.parametrize(
    ("probability", "wanted"), [(0.0, 0.1973), (0.2, 0.1941), (0.5, 0.1821), (0.9, 0.1398), (1.0, 0.1250)]
)
def test_the_clip_by_the_certainty_of_the_end(probability: float, wanted: float) -> None:
    assert away_of(probability) == pytest.approx(wanted, abs=5e-5)


def test_what_is_clipped_by_hand() -> None:
    """Two replies of one token with old probabilities 0.5 and 0.25, so 0.18212 and 0.19289; ratios of 1.19 and 0.8."""
    old = torch.tensor([[0.0, 0.5], [0.0, 0.25]])
    batch = plain_batch([[0, 1], [0, 1]], policy_logprobs=old.log().clamp(min=-9), advantages=torch.tensor([1.0, -1.0]))
    logprobs = (old * torch.tensor([[1.0, 1.19], [1.0, 0.8]])).log().clamp(min=-9).requires_grad_()
    said = ECHO(logprobs, batch, Totals(2, 2, 2))
    first, second = (0.05 + 0.15 / (1 + math.exp(-4 * (1 - c))) for c in (0.5, 0.25))
    assert said.loss.item() == pytest.approx((-(1 + first) + max(0.8, 1 - second)) / 2, abs=1e-6)
    assert float(said.metrics["loss/clip_fraction"]) == 1.0
    said.loss.backward()  # at the bound neither moves
    assert logprobs.grad is not None and not logprobs.grad[:, 1].any()


def test_without_a_slope_it_is_grpo_with_the_middle_clip(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(4, 9)
    old, now = (-torch.rand(4, 9, generator=generator) for _ in range(2))
    batch = plain_batch(mask, policy_logprobs=old, advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]))
    flat, plain = made.loss("echo", slope=0.0), made.loss("grpo", clip_low=0.125, clip_high=0.125)
    ours, theirs = (loss(now, batch, Totals(4, 36, 9)) for loss in (flat, plain))
    torch.testing.assert_close(ours.loss, theirs.loss)
    assert all(torch.allclose(ours.metrics[name], value) for name, value in theirs.metrics.items())


@pytest.mark.parametrize(
    "words",
    ["credit=entropy credit.keep=0", "credit=echo credit.bound=0", "credit=echo credit.amount=-1"]
    + ["loss=echo loss.tail=0", "loss=echo loss.slope=-1", "loss=echo loss.clip_low=1.5"],
)
def test_numbers_out_of_range_are_refused(words: str) -> None:
    assert words.split()[1].partition("=")[0] in refusal(*words.split())


def test_a_run_with_both(tmp_path: Path) -> None:
    settings = replace(settings_for(tmp_path, steps=2, epochs=2), eval=NO_EXAM)
    last = records_of(settings, credit=credit("echo"), loss=made.loss("echo"))[-1].metrics
    assert 0.125 <= last["loss/clip_mean"] <= 0.2
