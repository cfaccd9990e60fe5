"""Every metric has a sentence; the computed ones agree with numbers worked out by hand and with brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.metrics import (
    METRICS,
    describe,
    kept_metrics,
    mean_interval,
    pass_at_k,
    rollout_metrics,
    wilson_interval,
    zero_std_share,
)
from grpo_cli.settings import Sampling
from grpo_cli.types import Finish, Prompt, Request, Reward, Rollout, ScoredGroup


def group(*rewards: float, lengths: tuple[int, ...] = (), cut: tuple[int, ...] = (), **parts: float) -> ScoredGroup:
    prompt = Prompt("p", (1,), "")
    lengths = lengths or (1,) * len(rewards)
    rollouts = tuple(
        Rollout(
            request=Request(prompt, sample, 0, Sampling.plain(128)),
            token_ids=(5,) * length,
            sampler_logprobs=(-1.0,) * length,
            finish=Finish.LENGTH if sample in cut else Finish.EOS,
            kept_kv=0,
        )
        for sample, length in enumerate(lengths)
    )
    return ScoredGroup(prompt, rollouts, tuple(Reward(total, parts) for total in rewards))


def test_rollout_metrics_are_those_worked_out_by_hand() -> None:
    groups = [
        group(1.0, 0.0, lengths=(2, 4), cut=(1,), correct=0.5),
        group(1.0, 1.0, 1.0, lengths=(1, 1, 7), correct=1.0, format=0.25),
    ]
    metrics = rollout_metrics(groups)
    assert metrics == pytest.approx(
        {
            "reward/mean": 4 / 5,
            "reward/std": 0.4,  # values 1 1 1 1 0 about 0.8: (4 * 0.04 + 0.64) / 5 = 0.16
            "reward/correct": (2 * 0.5 + 3 * 1.0) / 5,
            "reward/format": 0.25,
            "group/zero_std": 1 / 2,
            "group/mixed": 1.0,
            "response/length_mean": 15 / 5,
            "response/length_max": 7,
            "response/truncated": 1 / 5,
        }
    )


def test_every_computed_metric_has_a_sentence() -> None:
    for name in {**rollout_metrics([group(1.0, 0.0, format=1.0)]), **kept_metrics([group(1.0, 0.0)], [group(1.0)])}:
        assert describe(name).endswith(".")


@pytest.mark.parametrize(
    "name", ["reward/format", "eval/pass@1", "eval/pass@16_low", "eval/pass@8_high", "engine/evictions", "time/warmup"]
)
def test_patterns_cover_names_that_runs_invent(name: str) -> None:
    assert name not in METRICS
    assert describe(name)


@pytest.mark.parametrize("name", ["", "loss/typo", "eval/pass@", "eval/pass@0", "eval/pass@k", "reward/", "engine/a/b"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(KeyError, match="is not a metric"):
        describe(name)


def test_a_name_of_its_own_comes_before_a_pattern() -> None:
    assert describe("reward/std") == METRICS["reward/std"] != METRICS["reward/<part>"]


def test_equal_rewards_that_no_float_holds_exactly_still_have_no_spread() -> None:
    assert np.std([0.1, 0.1, 0.1]) != 0.0  # which is why exact equality is asked for
    assert rollout_metrics([group(0.1, 0.1, 0.1)])["reward/std"] == 0.0
    assert zero_std_share([group(0.1, 0.1, 0.1)]) == 1.0


def test_nearly_equal_rewards_are_not_equal() -> None:
    assert zero_std_share([group(0.1, 0.1 + 1e-15), group(0.5, 0.5), group(0.0), group()]) == pytest.approx(2 / 3)


def test_kept_metrics_speak_of_the_kept_rollouts_alone() -> None:
    whole = [group(1.0, 0.0, 0.0, 0.0), group(1.0, 1.0, 0.0, 0.0)]
    kept = [whole[0].take([0, 1]), whole[1].take([0, 1])]
    assert kept_metrics(kept, kept) == {"reward/kept_mean": 3 / 4, "group/zero_std_kept": 1 / 2}
    assert kept_metrics(kept, []) == {"group/zero_std_kept": 1 / 2}


def test_without_rollouts_there_are_no_metrics() -> None:
    assert rollout_metrics([]) == {} == rollout_metrics([group()])
    assert kept_metrics([], []) == {} == kept_metrics([group()], [group()])


def test_a_reward_part_may_not_take_the_name_of_a_metric() -> None:
    with pytest.raises(ValueError, match="cannot be called 'mean'"):
        rollout_metrics([group(1.0, 0.0, mean=1.0)])


@settings(max_examples=40)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(answers: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    subsets = list(itertools.combinations(answers, k))
    brute = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(sum(answers), len(answers), k) == pytest.approx(brute)


def test_pass_at_k_does_not_overflow() -> None:
    # 1 right answer of 10 000: the chance that it is among 5 000 drawn is one half.
    assert pass_at_k(1, 10_000, 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("correct", "n", "k"), [(1, 4, 5), (1, 4, 0), (5, 4, 1), (-1, 4, 1)])
def test_pass_at_k_refuses_impossible_counts(correct: int, n: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs 1 <= k <= n"):
        pass_at_k(correct, n, k)


def test_wilson_interval_is_that_of_the_literature() -> None:
    # Tables give 0.490 to 0.943 for 8 of 10, and 0 to 0.161 for 0 of 20.
    assert wilson_interval(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611252), abs=1e-6)
    assert wilson_interval(20, 20) == pytest.approx((0.8388748, 1.0), abs=1e-6)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@settings(max_examples=40)
@given(st.integers(1, 300), st.data())
def test_wilson_interval_holds_the_shares_that_a_score_test_accepts(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    low, high = wilson_interval(successes, n)
    share = successes / n
    assert 0.0 <= low <= share <= high <= 1.0
    for end in (low, high):  # the definition: the ends are where |share - p| is 1.96 standard errors of p
        if 0.0 < end < 1.0:
            assert abs(share - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / n), rel=1e-5)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=60), st.integers(1, 8))
@settings(max_examples=40)
def test_an_interval_of_zeros_and_ones_is_a_wilson_interval(values: list[float], trials: int) -> None:
    assert mean_interval(values, trials) == pytest.approx(wilson_interval(sum(values), len(values)))


def test_an_interval_uses_that_values_between_say_more_than_coin_flips() -> None:
    values = [0.25, 0.75] * 50  # p(1-p) = 1/4, s^2 = 1/16: as certain as 400 coin flips
    assert mean_interval(values, trials=8) == pytest.approx(wilson_interval(200, 400))
    assert mean_interval(values, trials=2) == pytest.approx(wilson_interval(100, 200))
    assert mean_interval(values) == pytest.approx(wilson_interval(50, 100))
    assert mean_interval([0.5, 0.5], trials=4) == pytest.approx(wilson_interval(4, 8))


def test_intervals_cover_the_truth_about_19_times_in_20() -> None:
    rng = np.random.default_rng(0)
    hits, runs, k = 0, 1000, 4
    for _ in range(runs):  # 100 problems of different difficulty (mean 0.4), 4 samples each
        chances = rng.beta(0.8, 1.2, size=100)
        values = rng.binomial(k, chances) / k
        low, high = mean_interval(values.tolist(), trials=k)
        hits += low <= 0.4 <= high
    assert 0.93 <= hits / runs <= 0.97


def test_an_interval_refuses_what_is_no_share() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        mean_interval([0.5, 1.5])
    with pytest.raises(ValueError, match="successes in"):
        wilson_interval(3, 2)
    assert mean_interval([]) == (0.0, 1.0)
