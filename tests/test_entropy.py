"""The policy's entropy: that of the whole distribution, of trained tokens alone, and for nothing in the gradient."""

from __future__ import annotations

import math
from typing import Any

import made
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from small import VOCABULARY, plain_batch, small_model

from grpo_cli.learner.forward import PackedTrees, Padded, padded
from grpo_cli.learner.learner import Learner, Update
from grpo_cli.learner.logprobs import PLAIN, _Chosen, few_rows, log_softmax
from grpo_cli.settings import Sampling
from grpo_cli.support.meter import Meter
from grpo_cli.tracking.progress import Progress, TrainedStep, step_metrics
from grpo_cli.types import Batch, EngineStats

FORWARDS = {
    "padded": lambda chunk, temperature: Padded(10_000, chunk, temperature),
    "packed": lambda chunk, temperature: PackedTrees(10_000, chunk, temperature),
}


def some_batch(seed: int = 0) -> Batch:
    """Five rows of two prompts, with replies of 1 to 9 tokens; about two thirds of the tokens weigh something."""
    g = torch.Generator().manual_seed(seed)
    replies, prompts = torch.tensor([9, 1, 4, 6, 2]), torch.tensor([3, 3, 3, 5, 5])
    ids = torch.randint(2, VOCABULARY, (5, 12), generator=g)
    ids[:3, :3], ids[3:, :5] = ids[0, :3].clone(), ids[3, :5].clone()
    places = torch.arange(12)
    mask = (places >= prompts[:, None]) & (places < (prompts + replies)[:, None])
    weights = torch.rand(ids.shape, generator=g) * (torch.rand(ids.shape, generator=g) < 0.67) * mask
    ids = ids * (places < (prompts + replies)[:, None])
    numbers = torch.randn(5, generator=g)
    return plain_batch(mask, input_ids=ids, weights=weights, advantages=numbers)


@torch.no_grad()
def brute_force(model: Any, batch: Batch, temperature: float) -> torch.Tensor:
    """Of the distribution that predicts each token, in float64."""
    p = (model(padded(batch)).logits.double() / temperature).softmax(-1)
    return -(p * p.log()).sum(-1)[batch.spread(torch.arange(len(batch))), batch.positions - 1]


@pytest.mark.parametrize("way", FORWARDS)
@hypothesis_settings(deadline=None, max_examples=12)
@given(chunk=st.integers(1, 30), temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]), seed=st.integers(0, 5))
def test_every_forward_measures_what_the_whole_logits_say(way: str, chunk: int, temperature: float, seed: int) -> None:
    model, batch = small_model(), some_batch(seed)
    forward = FORWARDS[way](chunk, temperature)
    expected, found = brute_force(model, batch, temperature), torch.zeros(len(batch.token_ids))
    forward.logprobs(model, batch, found).sum().backward()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    with torch.no_grad():  # and forward where there is no gradient
        again = torch.zeros_like(found)
        forward.logprobs(model, batch, again)
    assert torch.equal(again, found)


def backward(logits: torch.Tensor, temperature: float = 1.0, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The entropies of each row of logits, and the gradient that was written over them, of token 0 of each row."""
    room = torch.full((len(logits),), math.nan)
    leaf = logits.clone().requires_grad_()
    ids = torch.zeros(len(logits), dtype=torch.long)
    _Chosen.apply(leaf.clone(), ids, temperature, PLAIN, room).backward(torch.full((len(logits),), factor))
    assert leaf.grad is not None
    return room, leaf.grad


def test_two_tokens_have_the_entropy_worked_out_by_hand() -> None:
    """Odds of 1 to 3; at half the temperature of 1 to 9."""
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert backward(logits)[0].tolist() == pytest.approx([math.log(4) - 0.75 * math.log(3)], abs=1e-6)
    assert backward(logits, 0.5)[0].tolist() == pytest.approx([math.log(10) - 0.9 * math.log(9)], abs=1e-6)


def test_a_token_that_cannot_come_adds_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf], [5.0, -math.inf, -math.inf], [0.0, 0.0, -1e30]])
    assert backward(logits)[0].tolist() == pytest.approx([math.log(2), 0.0, math.log(2)], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_uniform_model_has_the_logarithm_of_its_vocabulary(dtype: torch.dtype) -> None:
    model, batch = small_model(vocab_size=1000, tie_word_embeddings=False).to(dtype), some_batch()
    model.lm_head.weight.data.zero_()
    found = torch.zeros(len(batch.token_ids))
    Padded(10_000, 7, 1.0).logprobs(model, batch, found).sum().backward()
    assert found.tolist() == pytest.approx([math.log(1000)] * len(found), abs=2e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_in_half_precision_are_summed_in_float32(temperature: float) -> None:
    """In bfloat16 a sum of 50,000 numbers would be off by parts of a nat."""
    logits = (3 * torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    p = (logits.double() / temperature).softmax(-1)
    assert backward(logits, temperature)[0].tolist() == pytest.approx((-(p * p.log()).sum(-1)).tolist(), abs=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_to_the_bit_what_it_is_without(dtype: torch.dtype) -> None:
    logits = torch.randn(9, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected, factor = logits.clone(), torch.full((9,), 0.3) / 0.7
    ids = torch.zeros(9, dtype=torch.long)
    for some, which, by in few_rows(expected, ids, factor):
        slope = log_softmax(some, 0.7).exp_().mul_(-by[:, None])
        some.copy_(slope.scatter_add_(1, which[:, None], by[:, None]))
    assert torch.equal(backward(logits, 0.7, 0.3)[1], expected)


def learner_of(model: Any, tokens: int = 10_000, **train: Any) -> Learner:
    settings = made.train(micro_batch_tokens=tokens, logprob_chunk=4, **train)
    return Learner(
        model, made.loss(), made.model(""), Sampling.plain(9, temperature=0.7), settings, made.optim(), Meter()
    )


@pytest.mark.parametrize("tokens", [12, 30, 10_000])
def test_an_update_tells_the_mean_over_its_trained_tokens_however_it_is_cut(tokens: int) -> None:
    """Before the weights move; weights and advantages have no part in it."""
    model, batch = small_model(), some_batch()
    expected = brute_force(model, batch, 0.7)[batch.trained_mask].mean()
    found = learner_of(model, tokens).update(batch, 0).metrics["policy/entropy"]
    assert found == pytest.approx(float(expected), abs=1e-5)
    assert expected != pytest.approx(float(brute_force(model, batch, 0.7)[batch.response_mask].mean()), abs=1e-3)


def test_several_updates_are_averaged_as_their_losses_are_and_one_without_is_passed_over() -> None:
    each = [{"loss/total": 1.0, "policy/entropy": 0.5}, {"loss/total": 2.0}, {"loss/total": 6.0, "policy/entropy": 0.2}]
    updates = tuple(Update(metrics, torch.zeros(0), None, True) for metrics in each)
    found = step_metrics(Progress(), [], EngineStats(), TrainedStep(updates, [], 0, {}, {}))
    assert (found["loss/total"], found["policy/entropy"]) == (pytest.approx(3.0), pytest.approx(0.35))
