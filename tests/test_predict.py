"""Predictors: that they say what they know, are judged on what they said, and remember it over a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made import mean_length, prefix_head

from grpo_cli.engine.length_predictor import PrefixHead, kendall_tau
from grpo_cli.rules.ridge import WIDTH, fit_ridge
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Finish, Prompt, Request, Rollout


def request(prompt_id: str, sample: int = 0, limit: int = 100, prompt_tokens: int = 3) -> Request:
    prompt = Prompt(prompt_id, tuple(range(prompt_tokens)), "")
    return Request(prompt, sample, seed=sample, sampling=Sampling.plain(limit))


def rollout(asked: Request, length: int) -> Rollout:
    finish = Finish.LENGTH if length == asked.sampling.max_new_tokens else Finish.EOS
    return Rollout(asked, tuple(range(length)), (0.0,) * length, finish, kept_kv=0)


def tau_by_pairs(first: Sequence[float], second: Sequence[float]) -> float:
    agree = untied_first = untied_second = 0
    for i in range(len(first)):
        for j in range(i):
            a, b = first[i] - first[j], second[i] - second[j]
            agree += ((a > 0) - (a < 0)) * ((b > 0) - (b < 0))
            untied_first += a != 0
            untied_second += b != 0
    return agree / math.sqrt(untied_first * untied_second) if untied_first and untied_second else 0.0


def test_kendall_tau_of_known_rankings():
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1.0
    assert kendall_tau([1, 2, 3], [30, 20, 10]) == -1.0
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx((5 - 1) / 6)
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(2 * 3))
    assert kendall_tau([5, 5, 5], [1, 2, 3]) == 0.0  # one that ranks nothing
    assert kendall_tau([], []) == kendall_tau([1], [1]) == 0.0


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 6), st.floats(-3, 3).map(round)), max_size=25))
def test_kendall_tau_is_what_counting_pairs_gives(pairs):
    first, second = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    assert kendall_tau(first, second) == pytest.approx(tau_by_pairs(first, second))


def test_the_mean_is_of_the_prompt_if_it_was_seen_and_else_of_all():
    predictor = mean_length(decay=1.0)
    assert predictor.predict([request("a")], None) is None
    assert (
        predictor.learn([rollout(request("a"), 10), rollout(request("a", 1), 20), rollout(request("b"), 60)], None)
        == {}
    )
    assert predictor.predict([request("a"), request("b"), request("new")], None) == [15.0, 60.0, 30.0]
    assert predictor.predict([request("b", limit=50)], None) == [50.0]


def test_each_generate_makes_the_older_ones_count_less():
    predictor = mean_length(decay=0.5)
    predictor.learn([rollout(request("a"), 40)], None)
    predictor.learn([rollout(request("a"), 10)], None)
    assert predictor.predict([request("a")], None) == [pytest.approx((0.5 * 40 + 10) / 1.5)]


def test_predictions_are_judged_before_they_are_learnt_from_and_only_once():
    predictor = mean_length(decay=1.0)
    predictor.learn([rollout(request("a"), 10), rollout(request("b"), 20)], None)
    predictor.predict([request("a", 5), request("b", 5)], None)
    finished = [rollout(request("b", 5), 50), rollout(request("a", 5), 8)]  # in order of finishing, not of asking
    assert predictor.learn(finished, None) == {
        "predictor/kendall_tau": 1.0,
        "predictor/mean_absolute_error": (2 + 30) / 2,
    }
    assert predictor.learn(finished, None) == {}


def test_what_was_said_of_an_evaluation_is_judged_never():
    predictor = mean_length()
    predictor.learn([rollout(request("a"), 10)], None)
    predictor.predict([replace(request("a"), held_out=True)], None)
    assert predictor.learn([], None) == {}
    assert predictor.learn([rollout(request("a"), 30)], None) == {}


def generate(predictor: PrefixHead, seed: int, count: int = 64, width: int = 12, noise: float = 0.1):
    """One `generate` whose lengths are hidden in the first direction of the states; returns what `learn` says."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, width, generator=random)
    logs = 3 + 0.8 * hidden[:, 0] + noise * torch.randn(count, generator=random)
    asked = [request(f"p{i % 4}", i, limit=400) for i in range(count)]
    remaining = [min(max(1, round(math.exp(x) - 1)), 396) for x in logs.tolist()]
    predicted = predictor.predict(asked, hidden)
    order = torch.randperm(count, generator=random).tolist()
    finished = [rollout(asked[i], remaining[i] + predictor.prefix_tokens) for i in order]
    return predicted, remaining, predictor.learn(finished, hidden[order])


def test_the_prefix_head_learns_to_read_the_hidden_state():
    predictor = prefix_head(prefix_tokens=4)
    first, _, metrics = generate(predictor, seed=0)
    assert first is None and metrics == {}
    predicted, remaining, metrics = generate(predictor, seed=1)
    assert predicted is not None
    assert metrics["predictor/kendall_tau"] > 0.85
    assert metrics["predictor/kendall_tau"] == pytest.approx(tau_by_pairs(predicted, remaining))
    errors = [abs(a - b) for a, b in zip(predicted, remaining, strict=True)]
    assert metrics["predictor/mean_absolute_error"] == pytest.approx(sum(errors) / len(errors))
    assert metrics["predictor/mean_absolute_error"] < 0.3 * sum(remaining) / len(remaining)


def test_a_state_that_says_nothing_is_shrunk_to_the_mean():
    # 60 directions of pure noise and 64 rollouts: a plain fit would reproduce each length and know none.
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 200, (64,), generator=random).tolist()
    asked = [request(f"p{i % 4}", i, limit=400) for i in range(64)]
    predictor = prefix_head(min_rollouts=64)
    finished = [rollout(one, length) for one, length in zip(asked, lengths, strict=True)]
    predictor.learn(finished, torch.randn(64, 60, generator=random))
    predicted = predictor.predict(asked, torch.randn(64, 60, generator=random))
    assert predicted is not None and 40 < min(predicted) and max(predicted) < 160


def test_rollouts_that_end_within_the_prefix_teach_nothing():
    predictor = prefix_head(prefix_tokens=4, min_rollouts=2)
    predictor.learn([rollout(request("a", i), 4) for i in range(8)], torch.randn(8, 3))
    assert predictor.predict([request("a")], torch.zeros(1, 3)) is None


def test_a_rollout_cut_off_at_its_limit_is_an_observation_and_no_prediction_exceeds_it():
    predictor = prefix_head(prefix_tokens=4, min_rollouts=8)
    predictor.learn([rollout(request("a", i, limit=50), 50) for i in range(8)], torch.randn(8, 3))
    assert predictor.predict([request("a", limit=50)], torch.zeros(1, 3)) == [pytest.approx(46.0)]
    assert predictor.predict([request("a", limit=20)], torch.zeros(1, 3)) == [16.0]


def test_wide_states_are_narrowed_and_still_read():
    predictor = prefix_head(min_rollouts=64)
    for seed in range(3):
        *_, metrics = generate(predictor, seed, count=300, width=300, noise=0.0)
    assert predictor.state()["features"].shape[1] == WIDTH + 4
    assert metrics["predictor/kendall_tau"] > 0.3


def test_the_same_rollouts_give_the_same_predictions_and_a_resumed_one_goes_on_bit_for_bit():
    first, second = prefix_head(), prefix_head()
    for predictor in (first, second):
        generate(predictor, seed=0)
    assert generate(first, seed=1)[0] == generate(second, seed=1)[0]
    resumed = prefix_head()
    resumed.load_state(first.state())
    assert generate(resumed, seed=2) == generate(first, seed=2)


def test_another_predictor_s_state_is_refused():
    with pytest.raises(UserError, match="predictor=mean has learnt.*predictor=prefix"):
        prefix_head().load_state(mean_length().state())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: mean_length(decay=0.0), "predictor.decay=0.0"),
        (lambda: prefix_head(decay=1.5), "predictor.decay=1.5"),
        (lambda: prefix_head(prefix_tokens=0), "predictor.prefix_tokens=0"),
        (lambda: prefix_head(min_rollouts=10, replay=5), "predictor.min_rollouts=10"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(make, named):
    with pytest.raises(UserError, match=named):
        make()


def test_the_ridge_is_the_closed_form() -> None:
    rng = np.random.default_rng(1)
    features, targets = rng.standard_normal((30, 4)) * [1, 10, 0.1, 1] + 3, rng.random(30)
    head = fit_ridge(features, targets, np.array([0.05]))
    centred = (features - features.mean(0)) / features.std(0)
    weights = np.linalg.solve(centred.T @ centred + 0.05 * 30 * np.eye(4), centred.T @ (targets - targets.mean()))
    assert head(features) == pytest.approx(centred @ weights + targets.mean(), abs=1e-12)
