"""Ways through the model: padded rows, no padding, and a prompt once for all its replies give the same."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import made
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from small import VOCABULARY, require_c, scored, small_model
from test_learner import make_learner
from tiny_hf import FAMILIES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_cli.learner import forward
from grpo_cli.learner.batch import collate, corrected, minibatches, rows_of, tokens_of, totals, with_rows_untrained
from grpo_cli.learner.forward import PackedTrees, Padded, pack, padded, padded_parts
from grpo_cli.learner.learner import Learner
from grpo_cli.learner.logprobs import PLAIN, _Chosen
from grpo_cli.model.load import load_model
from grpo_cli.settings import Sampling
from grpo_cli.support.meter import Meter
from grpo_cli.types import ENVIRONMENT, GIVEN, Batch, Span, Totals, Verdict


def make_batch(groups: list[tuple[int, list[int]]], seed: int = 0) -> Batch:
    """One row per reply; a group is the length of its prompt and those of its replies."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, VOCABULARY, (count,), generator=generator).tolist())

    made = []
    for width, replies in groups:
        prompt = drawn(width)
        made.append(scored(*[0.0] * len(replies), prompt=prompt, replies=[drawn(reply) for reply in replies]))
    batch = collate(made)
    return replace(batch, advantages=batch.per_token(torch.randn(len(batch), generator=generator)))


UNEVEN = [(7, [9, 1, 4, 4]), (3, [2]), (12, [5, 8, 1]), (1, [3, 3])]


def computed(way: Any, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of all rows, and the gradient of their weighted sum, micro-batch by micro-batch."""
    model.zero_grad()
    values = torch.zeros(len(batch.token_ids))
    for rows in map(torch.tensor, way.cut(batch)):
        part = rows_of(batch, rows)
        logprobs = way.logprobs(model, part)
        (logprobs * part.advantages).sum().backward()
        values[tokens_of(batch, rows)] = logprobs.detach()
    return values, torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("natively", [False, True])
def test_every_way_gives_the_same_logprobs_and_gradient_wherever_rows_lie(family, natively):
    require_c("tree") if natively else None
    model, batch = small_model(family), make_batch(UNEVEN)
    plain, slope = computed(Padded(10_000, 64, 0.7), model, batch)
    order = torch.tensor([4, 0, 9, 7, 2, 8, 5, 1, 3, 6])
    for tokens in (10_000, 30, 1):  # one micro-batch, groups cut between rows, every row by itself
        values, gradient = computed(PackedTrees(tokens, 5, 0.7, natively), model, rows_of(batch, order))
        torch.testing.assert_close(values, plain[tokens_of(batch, order)], atol=1e-5, rtol=0)
        assert (gradient - slope).norm() < 1e-5 * slope.norm()


def test_a_shared_prompt_stands_in_the_run_once():
    """Prompt a b with replies c and d e, and prompt f with reply g: the run is a b c d e f g."""
    batch = make_batch([(2, [1, 2]), (1, [1])])
    ids, trees, predicting = pack(batch)
    assert trees == [(2, 1, 2), (2,)]
    assert ids.tolist() == [*batch.prompts[0], *batch.token_ids[:3], *batch.prompts[1], batch.token_ids[3]]
    assert predicting.tolist() == [1, 1, 3, 5]  # b predicts both c and d


@pytest.mark.parametrize("tokens", [1, 9, 12, 20, 31, 60])
def test_micro_batches_take_each_row_once_and_keep_to_the_budget(tokens):
    batch = make_batch(UNEVEN)
    parts = PackedTrees(tokens, 64, 0.7).cut(batch)
    assert sorted(row for rows in parts for row in rows) == list(range(len(batch)))
    for rows in parts:
        ids, trees, _ = pack(rows_of(batch, torch.tensor(rows)))
        assert (len(ids) <= tokens or len(rows) == 1) and sum(map(sum, trees)) == len(ids)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_an_update_is_the_same_packed_or_padded_and_with_groups_without_an_advantage_forward_alone(name, monkeypatch):
    """Of four groups two have none, one a negative one; in the third one row has none. Metrics are of all tokens."""
    batch = make_batch(UNEVEN)
    rows = torch.tensor([0.0] * 4 + [-1.0] + [1.5, 0.0, -2.0] + [0.0] * 2)
    batch = replace(batch, advantages=batch.per_token(rows), old_logprobs=torch.full(batch.weights.shape, -3.0))
    found = list[Any]()
    for packs, skips in product((True, False), repeat=2):
        monkeypatch.setattr(forward, "packs_rows", lambda *_, packs=packs: packs)
        model, grads, seen = small_model(), list[torch.Tensor](), list[int]()
        policy = make_learner(model)
        policy._optimizer.step = lambda model=model, grads=grads: grads.extend(p.grad for p in model.parameters())
        loss = made.loss(name)

        def watched(logprobs: Any, part: Batch, totals: Any, loss: Any = loss, seen: Any = seen) -> Any:
            seen.extend([len(part)] if logprobs.requires_grad else [])
            return loss(logprobs, part, totals)

        watched.needs_advantage = skips and loss.needs_advantage  # type: ignore[attr-defined]
        update = policy.update(batch, 0, watched)
        assert seen == ([4] if skips else [10])
        found.append((torch.cat([grad.flatten() for grad in grads]), update))
    *others, (slope, expected) = found
    for gradient, update in others:
        assert (gradient - slope).norm() < 1e-5 * slope.norm()
        assert update.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(update.logprobs, expected.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_the_gradient_of_shared_prompts_has_the_same_bits_each_time(threads):
    """A prompt's last state predicts the first token of all its replies, whose gradients are added up."""
    model = load_model(made.model(), torch.device("cpu")).train()
    batch = make_batch([(20, [40, 37, 25, 30, 33, 21, 40, 40]), (17, [40, 12, 39, 30] * 3)])
    way = PackedTrees(16_384, 64, 1.0)
    found = set()
    for _ in range(10):
        model.zero_grad()
        (way.logprobs(model, batch) * torch.linspace(0, 1, len(batch.token_ids))).sum().backward()
        found.add(tuple(float(p.grad.double().sum()) for p in model.parameters()))
    assert len(found) == 1


# Batches


def two_groups() -> Batch:
    """Prompts 5 6 and 4; completions 7 1, 8 9 1 and 1."""
    said = [(-3.5, -0.5), (-4.0, -4.5, -0.5)]
    one = scored(0, 0, name="a", prompt=(5, 6), replies=[(7, 1), (8, 9, 1)], logprobs=said)
    batch = collate([one, scored(0, name="b", prompt=(4,), logprobs=[(-0.5,)])])
    return replace(batch, advantages=batch.per_token(torch.tensor([1.0, -1.0, 0.25])))


def test_each_prompt_is_there_once_and_each_number_stands_at_its_token():
    batch = two_groups()
    assert (batch.prompts, batch.group.tolist(), batch.lengths.tolist()) == (((5, 6), (4,)), [0, 0, 1], [2, 3, 1])
    assert batch.token_ids.tolist() == [7, 1, 8, 9, 1, 1] and batch.response_mask.all()
    assert batch.sampler_logprobs.tolist() == [-3.5, -0.5, -4, -4.5, -0.5, -0.5]
    assert batch.positions.tolist() == [2, 3, 2, 3, 4, 1]
    assert padded(batch).tolist() == [[5, 6, 7, 1, 0], [5, 6, 8, 9, 1], [4, 1, 0, 0, 0]]
    assert batch.old_logprobs is None and batch.ref_logprobs is None


def test_a_row_that_is_left_out_is_a_sequence_without_tokens_whatever_a_correction_says_of_it():
    left = with_rows_untrained(two_groups(), [True, False, False])
    verdict = Verdict(torch.ones(6), torch.ones(6, dtype=torch.bool), ("",) * 3, {})
    for batch in (left, corrected(left, verdict)):
        assert batch.loss_mask.tolist() == [False] * 2 + [True] * 4 and batch.weights.tolist() == [0] * 2 + [1] * 4
        assert totals(batch, 9) == Totals(sequences=3, tokens=4, max_new_tokens=9)


def test_each_token_is_as_old_as_the_weights_that_drew_it():
    """Of version 5 and of the environment: 0; of version 3: 2; given: -1; and a rollout without spans is of now."""
    spans = [(Span(3, 2), Span(5, 1)), (Span(GIVEN, 1), Span(ENVIRONMENT, 1)), ()]
    group = scored(0, 0, 0, replies=[(2, 2, 2), (2, 2), (2,)])
    rollouts = tuple(replace(one, spans=some) for one, some in zip(group.rollouts, spans, strict=True))
    batch = collate([replace(group, rollouts=rollouts)], version=5)
    assert batch.token_ages is not None and batch.token_ages.tolist() == [0 + 2, 2, 0, GIVEN, 0, 0]
    assert batch.response_mask.tolist() == [True, True, True, True, False, True]
    assert batch.sampler_logprobs.tolist() == [-1, -1, -1, 0, 0, -1]
    now = replace(rollouts[1], spans=(Span(5, 1), Span(ENVIRONMENT, 1)))
    assert collate([replace(group, rollouts=(now, rollouts[2]))], version=5).token_ages is None


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_padded_parts_hold_every_row_once_within_the_budget(lengths, tokens):
    parts = padded_parts(lengths, tokens)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or len(part) * max(lengths[row] for row in part) <= tokens for part in parts)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_minibatches_share_out_the_rows_evenly(count):
    parts = minibatches(two_groups(), count, np.random.default_rng(0))
    assert len(parts) == min(count, 3)
    rows = {(2, 7): 1.0, (3, 8): -1.0, (1, 1): 0.25}  # length and first token
    for part in parts:
        firsts = part.lengths.cumsum(0) - part.lengths
        for length, first in zip(part.lengths.tolist(), firsts.tolist(), strict=True):
            assert rows.pop((length, int(part.token_ids[first]))) == float(part.advantages[first])
    assert not rows and max(map(len, parts)) - min(map(len, parts)) <= 1


# Log-probabilities and entropies


def some_batch(seed: int = 0) -> Batch:
    """About two thirds of the tokens weigh something."""
    batch, g = make_batch([(3, [9, 1, 4]), (5, [6, 2])], seed), torch.Generator().manual_seed(seed)
    weights = torch.rand(22, generator=g) * (torch.rand(22, generator=g) < 0.67)
    return replace(batch, weights=weights)


def of_whole_logits(model: Any, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, in float64."""
    logs = (model(padded(batch)).logits.double() / temperature).log_softmax(-1)
    logs = logs[batch.per_token(torch.arange(len(batch))), batch.positions - 1]
    return logs.gather(1, batch.token_ids[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("way", [Padded, PackedTrees])
@hypothesis_settings(deadline=None, max_examples=12)
@given(chunk=st.integers(1, 30), temperature=st.sampled_from([0.3, 1.0, 2.0]), seed=st.integers(0, 5))
def test_values_gradients_and_entropies_are_those_of_the_whole_logits(way, chunk, temperature, seed):
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


def test_two_tokens_have_the_entropy_worked_out_by_hand():
    """Odds of 1 to 3; at half the temperature of 1 to 9. A token that cannot come adds nothing."""
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert entropies_of(logits) == pytest.approx([math.log(4) - 0.75 * math.log(3)], abs=1e-6)
    assert entropies_of(logits, 0.5) == pytest.approx([math.log(10) - 0.9 * math.log(9)], abs=1e-6)
    never = torch.tensor([[0.0, 0.0, -math.inf], [5.0, -math.inf, -math.inf], [0.0, 0.0, -1e30]])
    assert entropies_of(never) == pytest.approx([math.log(2), 0.0, math.log(2)], abs=1e-6)


def test_logits_in_half_precision_are_summed_in_float32():
    """In bfloat16 a sum of 50,000 numbers would be off by parts of a nat."""
    logits = (3 * torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    p = (logits.double() / 0.7).softmax(-1)
    assert entropies_of(logits, 0.7) == pytest.approx((-(p * p.log()).sum(-1)).tolist(), abs=1e-4)


class LargestLogits(TorchDispatchMode):
    """Remembers the most elements of any tensor as wide as the vocabulary, the head's weights (32 hidden) aside."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.shape[-1:] == (97,)]
        self.most = max([self.most, *(x.numel() for x in tensors if x.shape != (32, 97))])
        return result


def test_no_more_than_a_chunk_of_logits_exists_forward_or_backward():
    model = small_model(vocab_size=97, tie_word_embeddings=False)
    with LargestLogits() as seen:
        Padded(10_000, 4, 1.0).logprobs(model, some_batch()).sum().backward()
    assert 0 < seen.most <= 4 * 97


@pytest.mark.parametrize("tokens", [12, 10_000])
def test_an_update_tells_the_mean_over_its_trained_tokens_however_it_is_cut(tokens):
    """Before the weights move; weights and advantages have no part in it."""
    model, batch = small_model(), some_batch()
    entropies = of_whole_logits(model, batch, 0.7)[1].detach()
    settings = made.train(micro_batch_tokens=tokens, logprob_chunk=4)
    learner = Learner(model, made.loss(), made.model(""), Sampling.plain(9, 0.7), settings, made.optim(), Meter())
    found = learner.update(batch, 0).metrics["policy/entropy"]
    assert found == pytest.approx(float(entropies[batch.trained_mask].mean()), abs=1e-5)
    assert found != pytest.approx(float(entropies.mean()), abs=1e-3)
