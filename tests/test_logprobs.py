"""Log-probabilities and entropies by chunks are those of the whole logits, forward and backward."""

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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_cli.learner.forward import PackedTrees, Padded, padded
from grpo_cli.learner.learner import Learner
from grpo_cli.learner.logprobs import PLAIN, _Chosen
from grpo_cli.settings import Sampling
from grpo_cli.support.meter import Meter
from grpo_cli.types import Batch


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
    return plain_batch(mask, input_ids=ids, weights=weights, advantages=torch.randn(5, generator=g))


def of_whole_logits(model: Any, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, in float64."""
    logs = (model(padded(batch)).logits.double() / temperature).log_softmax(-1)
    logs = logs[batch.per_token(torch.arange(len(batch))), batch.positions - 1]
    return logs.gather(1, batch.token_ids[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("way", [Padded, PackedTrees])
@hypothesis_settings(deadline=None, max_examples=12)
@given(chunk=st.integers(1, 30), temperature=st.sampled_from([0.3, 1.0, 2.0]), seed=st.integers(0, 5))
def test_values_gradients_and_entropies_are_those_of_the_whole_logits(
    way: Any, chunk: int, temperature: float, seed: int
) -> None:
    model, batch = small_model(tie_word_embeddings=False), some_batch(seed)
    forward, found = way(10_000, chunk, temperature), torch.zeros(len(batch.token_ids))
    wanted, entropies = of_whole_logits(model, batch, temperature)
    (wanted * batch.weights).sum().backward()
    slopes = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    values = forward.logprobs(model, batch, found)
    (values * batch.weights).sum().backward()
    torch.testing.assert_close(values.double(), wanted, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found.double(), entropies, atol=1e-5, rtol=0)
    for weight, slope in zip(model.parameters(), slopes, strict=True):
        torch.testing.assert_close(weight.grad, slope, atol=5e-5, rtol=1e-3)
    with torch.no_grad():  # and forward where there is no gradient
        again = torch.zeros_like(found)
        forward.logprobs(model, batch, again)
    assert torch.equal(again, found)


def entropies_of(logits: Tensor, temperature: float = 1.0) -> list[float]:
    room, leaf = torch.full((len(logits),), math.nan), logits.clone().requires_grad_()
    ids = torch.zeros(len(logits), dtype=torch.long)
    _Chosen.apply(leaf.clone(), ids, temperature, PLAIN, room).sum().backward()
    return room.tolist()


def test_two_tokens_have_the_entropy_worked_out_by_hand() -> None:
    """Odds of 1 to 3; at half the temperature of 1 to 9. A token that cannot come adds nothing."""
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert entropies_of(logits) == pytest.approx([math.log(4) - 0.75 * math.log(3)], abs=1e-6)
    assert entropies_of(logits, 0.5) == pytest.approx([math.log(10) - 0.9 * math.log(9)], abs=1e-6)
    never = torch.tensor([[0.0, 0.0, -math.inf], [5.0, -math.inf, -math.inf], [0.0, 0.0, -1e30]])
    assert entropies_of(never) == pytest.approx([math.log(2), 0.0, math.log(2)], abs=1e-6)


def test_logits_in_half_precision_are_summed_in_float32() -> None:
    """In bfloat16 a sum of 50,000 numbers would be off by parts of a nat."""
    logits = (3 * torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    p = (logits.double() / 0.7).softmax(-1)
    assert entropies_of(logits, 0.7) == pytest.approx((-(p * p.log()).sum(-1)).tolist(), abs=2e-5)


class LargestLogits(TorchDispatchMode):
    """Remembers the most elements of any tensor as wide as the vocabulary, the head's weights (32 hidden) aside."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.shape[-1:] == (97,)]
        self.most = max([self.most, *(x.numel() for x in tensors if x.shape != (32, 97))])
        return result


def test_no_more_than_a_chunk_of_logits_exists_forward_or_backward() -> None:
    model = small_model(vocab_size=97, tie_word_embeddings=False)
    with LargestLogits() as seen:
        Padded(10_000, 4, 1.0).logprobs(model, some_batch()).sum().backward()
    assert 0 < seen.most <= 4 * 97


@pytest.mark.parametrize("tokens", [12, 10_000])
def test_an_update_tells_the_mean_over_its_trained_tokens_however_it_is_cut(tokens: int) -> None:
    """Before the weights move; weights and advantages have no part in it."""
    model, batch = small_model(), some_batch()
    entropies = of_whole_logits(model, batch, 0.7)[1].detach()
    settings = made.train(micro_batch_tokens=tokens, logprob_chunk=4)
    learner = Learner(model, made.loss(), made.model(""), Sampling.plain(9, 0.7), settings, made.optim(), Meter())
    found = learner.update(batch, 0).metrics["policy/entropy"]
    assert found == pytest.approx(float(entropies[batch.trained_mask].mean()), abs=1e-5)
    assert found != pytest.approx(float(entropies.mean()), abs=1e-3)
