"""Predictors: that they say what they know, are judged on what they said, and remember it over a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from made import mean_length, prefix_head
from small import make_engine, small_model, some_requests

from grpo_cli.engine.length_predictor import PrefixHead
from grpo_cli.engine.scheduling import Lpt
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Finish, Prompt, Request, Rollout


def request(prompt_id: str, sample: int = 0, limit: int = 100) -> Request:
    return Request(Prompt(prompt_id, (0, 1, 2), ""), sample, seed=sample, sampling=Sampling.plain(limit))


def rollout(asked: Request, length: int) -> Rollout:
    finish = Finish.LENGTH if length == asked.sampling.max_new_tokens else Finish.EOS
    return Rollout(asked, tuple(range(length)), (0.0,) * length, finish)


def test_a_mean_is_of_the_prompt_if_it_was_seen_and_else_of_all_and_older_lengths_count_less():
    predictor = mean_length(decay=1.0)
    assert predictor.predict([request("a")], None) is None
    predictor.learn([rollout(request("a"), 10), rollout(request("a", 1), 20), rollout(request("b"), 60)], None)
    assert predictor.predict([request("a"), request("b"), request("new")], None) == [15.0, 60.0, 30.0]
    assert predictor.predict([request("b", limit=50)], None) == [50.0]
    halving = mean_length(decay=0.5)
    for length in (40, 10):
        halving.learn([rollout(request("a"), length)], None)
    halving.learn([], None)
    assert halving.predict([request("a")], None) == [pytest.approx((0.5 * 40 + 10) / 1.5)]
    again = mean_length(decay=0.5)
    again.load_state_dict(halving.state_dict())
    assert again.predict([request("a"), request("b")], None) == halving.predict([request("a"), request("b")], None)


def test_an_engine_reports_how_true_the_predictions_were():
    """Of 12 rollouts of 3 prompts, each of which is predicted its prompt's mean of the first time."""
    engine, requests = make_engine(small_model(), predictor=mean_length(), scheduler=Lpt()), some_requests(3, 4)
    first = list(engine.generate(requests))
    list(engine.generate([replace(one, held_out=True, seed=one.seed ^ 2) for one in requests]))  # an evaluation
    lengths = {p: [len(r) for r in first if r.request.prompt.id == p] for p in ("p0", "p1", "p2")}
    again = list(engine.generate([replace(one, seed=one.seed ^ 1) for one in requests]))
    errors = [abs(len(r) - np.mean(lengths[r.request.prompt.id])) for r in again]
    assert engine.stats().details["predictor/mean_absolute_error"] == pytest.approx(np.mean(errors))


def generate(predictor: PrefixHead, seed: int) -> tuple[Sequence[float] | None, list[int]]:
    """One `generate` whose lengths are hidden in the first direction of the states."""
    count, random = 64, torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 12, generator=random)
    logs = 3 + 0.8 * hidden[:, 0] + 0.1 * torch.randn(count, generator=random)
    asked = [request(f"p{i % 4}", i, limit=400) for i in range(count)]
    remaining = [min(max(1, round(math.exp(x) - 1)), 396) for x in logs.tolist()]
    predicted = predictor.predict(asked, hidden)
    order = torch.randperm(count, generator=random).tolist()
    predictor.learn([rollout(asked[i], remaining[i] + predictor.prefix_tokens) for i in order], hidden[order])
    return predicted, remaining


def test_the_prefix_head_learns_to_read_the_hidden_state_and_a_resumed_one_goes_on_bit_for_bit():
    predictor, twin, resumed = prefix_head(prefix_tokens=4), prefix_head(prefix_tokens=4), prefix_head(prefix_tokens=4)
    assert [generate(one, seed=0)[0] for one in (predictor, twin)] == [None, None]
    resumed.load_state_dict(predictor.state_dict())
    predicted, remaining = generate(predictor, seed=1)
    assert predicted == generate(twin, seed=1)[0] == generate(resumed, seed=1)[0] and len(predicted) == 64
    assert np.mean(np.abs(np.subtract(predicted, remaining))) < 0.3 * np.mean(remaining)
    with pytest.raises(UserError, match="predictor"):
        predictor.load_state_dict(mean_length().state_dict())


def test_what_the_prefix_head_learns_from_and_what_it_may_predict():
    predictor, asked = prefix_head(prefix_tokens=4, min_rollouts=8), request("a", limit=50)
    for length, count in ((4, 8), (50, 7)):  # all ended within the prefix, then too few are longer
        predictor.learn([rollout(request("a", i, limit=50), length) for i in range(count)], torch.randn(count, 3))
        assert predictor.predict([asked], torch.zeros(1, 3)) is None
    predictor.learn([rollout(request("a", 7, limit=50), 50)], torch.randn(1, 3))
    assert predictor.predict([asked], torch.zeros(1, 3)) == [pytest.approx(46.0)], "cut off, and seen"
    assert predictor.predict([request("a", limit=20)], torch.zeros(1, 3)) == [16.0], "its own limit"
