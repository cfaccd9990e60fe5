"""Groups to tensors, a batch to parts: nothing is lost, and each number stands at its token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import scored

from grpo_cli.learner.batch import collate, corrected, minibatches, totals
from grpo_cli.learner.forward import padded, padded_parts
from grpo_cli.types import ENVIRONMENT, GIVEN, Batch, Span, Verdict


def two_groups() -> Batch:
    """Prompts 5 6 and 4; completions 7 1, 8 9 1 and 1."""
    said = [(-3.5, -0.5), (-4.0, -4.5, -0.5)]
    one = scored(0, 0, name="a", prompt=(5, 6), replies=[(7, 1), (8, 9, 1)], logprobs=said)
    batch = collate([one, scored(0, name="b", prompt=(4,), logprobs=[(-0.5,)])])
    return replace(batch, advantages=batch.per_token(torch.tensor([1.0, -1.0, 0.25])))


def test_each_prompt_is_there_once_and_each_number_stands_at_its_token() -> None:
    batch = two_groups()
    assert (batch.prompts, batch.group.tolist(), batch.lengths.tolist()) == (((5, 6), (4,)), [0, 0, 1], [2, 3, 1])
    assert batch.token_ids.tolist() == [7, 1, 8, 9, 1, 1] and batch.response_mask.all()
    assert batch.sampler_logprobs.tolist() == [-3.5, -0.5, -4, -4.5, -0.5, -0.5]
    assert batch.positions.tolist() == [2, 3, 2, 3, 4, 1]
    assert padded(batch).tolist() == [[5, 6, 7, 1, 0], [5, 6, 8, 9, 1], [4, 1, 0, 0, 0]]
    assert batch.old_logprobs is None and batch.ref_logprobs is None


def test_each_token_is_as_old_as_the_weights_that_drew_it() -> None:
    """Of version 5 and of the environment: 0; of version 3: 2; given: -1; and a rollout without spans is of now."""
    spans = [(Span(3, 2), Span(5, 1)), (Span(GIVEN, 1), Span(ENVIRONMENT, 1)), ()]
    group = scored(0, 0, 0, replies=[(2, 2, 2), (2, 2), (2,)])
    rollouts = tuple(replace(one, spans=some) for one, some in zip(group.rollouts, spans, strict=True))
    batch = collate([replace(group, rollouts=rollouts)], version=5)
    assert batch.token_ages is not None and batch.token_ages.tolist() == [0 + 2, 2, 0, GIVEN, 0, 0]
    assert batch.response_mask.tolist() == [True, True, True, True, False, True]
    assert batch.sampler_logprobs.tolist() == [-1, -1, -1, 0, 0, -1]
    assert collate([replace(group, rollouts=rollouts[2:])], version=5).token_ages is None


def test_totals_count_every_sequence_and_only_tokens_that_are_trained_on() -> None:
    batch = two_groups()
    mask = batch.per_token(torch.tensor([True, False, True]))
    fewer = corrected(batch, Verdict(batch.weights, mask, ("", "veto", ""), {}))
    assert (totals(batch, 9).sequences, totals(batch, 9).tokens) == (3, 6)
    assert (totals(fewer, 9).sequences, totals(fewer, 9).tokens) == (3, 3)
    assert torch.equal(fewer.weights, mask.float()) and batch.loss_mask.all()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_padded_parts_hold_every_row_once_within_the_budget(lengths: list[int], tokens: int) -> None:
    parts = padded_parts(lengths, tokens)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or len(part) * max(lengths[row] for row in part) <= tokens for part in parts)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_minibatches_share_out_the_rows_evenly(count: int) -> None:
    parts = minibatches(two_groups(), count, np.random.default_rng(0))
    assert len(parts) == min(count, 3)
    rows = {(2, 7): 1.0, (3, 8): -1.0, (1, 1): 0.25}  # length and first token
    for part in parts:
        firsts = part.lengths.cumsum(0) - part.lengths
        for length, first in zip(part.lengths.tolist(), firsts.tolist(), strict=True):
            assert rows.pop((length, int(part.token_ids[first]))) == float(part.advantages[first])
    assert not rows and max(map(len, parts)) - min(map(len, parts)) <= 1
