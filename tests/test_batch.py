"""Groups to tensors, a batch to parts: nothing is lost, and each number stands at its token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import scored

from grpo_cli.learner.batch import collate, corrected, micro_batch_rows, minibatches, rows_of, totals
from grpo_cli.settings import Sampling
from grpo_cli.types import GIVEN, Batch, Finish, Prompt, Request, Reward, Rollout, ScoredGroup, Span, Verdict


def two_groups() -> Batch:
    said = [(-3.5, -0.5), (-4.0, -4.5, -0.5)]
    one = scored(0, 0, name="a", prompt=(5, 6), replies=[(7, 1), (8, 9, 1)], logprobs=said)
    groups = [one, scored(0, name="b", prompt=(4,), logprobs=[(-0.5,)])]
    return replace(collate(groups, pad_token_id=0), advantages=torch.tensor([1.0, -1.0, 0.25]))


def test_each_row_is_prompt_response_padding_and_each_number_stands_at_its_token() -> None:
    batch = two_groups()
    assert batch.input_ids.tolist() == [[5, 6, 7, 1, 0], [5, 6, 8, 9, 1], [4, 1, 0, 0, 0]]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert batch.sampler_logprobs.tolist() == [[0, 0, -3.5, -0.5, 0], [0, 0, -4, -4.5, -0.5], [0, -0.5, 0, 0, 0]]
    assert batch.advantages.tolist() == [1.0, -1.0, 0.25]
    assert batch.lengths.tolist() == [4, 5, 2]
    assert batch.policy_logprobs is None and batch.ref_logprobs is None


def test_each_token_is_as_old_as_the_weights_that_drew_it() -> None:
    """Prompts of 1 token; of the first row two tokens are of version 3 and one of 5, of the other one was given."""
    prompt = Prompt("p", (1,), "")
    drawn = [
        Rollout(
            Request(prompt, 0, 0, Sampling.plain(3)), (2, 2, 2), (-1.0,) * 3, Finish.EOS, 3, (Span(3, 2), Span(5, 1))
        ),
        Rollout(
            Request(prompt, 1, 1, Sampling.plain(3)), (2, 2), (-1.0,) * 2, Finish.EOS, 2, (Span(GIVEN, 1), Span(5, 1))
        ),
    ]
    group = ScoredGroup(prompt, tuple(drawn), (Reward(0.0), Reward(1.0)))
    lags = collate([group], 0, version=5).lags
    assert lags is not None and lags.tolist() == [[0, 2, 2, 0], [0, -1, 0, 0]]
    fresh = replace(drawn[0], spans=(Span(5, 3),))
    assert collate([ScoredGroup(prompt, (fresh,), (Reward(0.0),))], 0, version=5).lags is None


def test_totals_count_every_sequence_and_only_tokens_that_are_trained_on() -> None:
    batch = two_groups()
    mask = batch.loss_mask.clone()
    mask[1] = False
    fewer = corrected(batch, Verdict(batch.weights, mask, ("", "veto", ""), {}))
    assert (totals(batch, 9).sequences, totals(batch, 9).tokens) == (3, 6)
    assert (totals(fewer, 9).sequences, totals(fewer, 9).tokens) == (3, 3)
    assert float(fewer.weights[1].sum()) == 0.0 and batch.loss_mask[1].any()


def test_a_part_is_trimmed_to_its_longest_row() -> None:
    part = rows_of(two_groups(), torch.tensor([0, 2]))
    assert part.input_ids.tolist() == [[5, 6, 7, 1], [4, 1, 0, 0]]
    assert part.advantages.tolist() == [1.0, 0.25]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], tokens: int) -> None:
    parts = micro_batch_rows(lengths, tokens)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[row] for row in part) <= tokens
    widths = [max(lengths[row] for row in part) for part in parts]
    assert widths == sorted(widths, reverse=True)


def test_a_part_ends_where_padding_would_cost_more_than_another_pass() -> None:
    """Ten rows of 100 with ten of 30 would hold 700 tokens of padding, more than a pass is worth; with 90 only 100."""
    assert [len(part) for part in micro_batch_rows([100] * 10 + [90] * 10, 10**6)] == [20]
    assert [len(part) for part in micro_batch_rows([100] * 10 + [30] * 10, 10**6)] == [17, 3]


def test_the_group_size_is_not_tied_to_the_micro_batch() -> None:
    assert micro_batch_rows(two_groups().lengths.tolist(), 8) == [[1], [0, 2]]


@given(st.integers(1, 7))
@settings(max_examples=7)
def test_minibatches_share_out_the_rows_evenly(count: int) -> None:
    batch = two_groups()
    parts = minibatches(batch, count, np.random.default_rng(0))
    assert len(parts) == min(count, 3)
    assert sorted(float(a) for part in parts for a in part.advantages) == [-1.0, 0.25, 1.0]
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
