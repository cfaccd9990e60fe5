"""Every metric has a sentence; the computed ones agree with numbers worked out by hand and with brute force."""

from __future__ import annotations

import numpy as np
import pytest
from small import describe

from grpo_cli.metrics import (
    kept_metrics,
    rollout_metrics,
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


@pytest.mark.parametrize("name", ["", "loss/typo", "eval/pass@", "eval/pass@0", "eval/pass@k", "reward/", "engine/a/b"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(KeyError, match="is not a metric"):
        describe(name)


def test_equal_rewards_that_no_float_holds_exactly_still_have_no_spread() -> None:
    assert np.std([0.1, 0.1, 0.1]) != 0.0  # which is why exact equality is asked for
    assert rollout_metrics([group(0.1, 0.1, 0.1)])["reward/std"] == 0.0
    assert zero_std_share([group(0.1, 0.1, 0.1)]) == 1.0


def test_kept_metrics_speak_of_the_kept_rollouts_alone() -> None:
    whole = [group(1.0, 0.0, 0.0, 0.0), group(1.0, 1.0, 0.0, 0.0)]
    kept = [whole[0].take([0, 1]), whole[1].take([0, 1])]
    assert kept_metrics(kept, kept) == {"reward/kept_mean": 3 / 4, "group/zero_std_kept": 1 / 2}
    assert kept_metrics(kept, []) == {"group/zero_std_kept": 1 / 2}


def test_without_rollouts_there_are_no_metrics() -> None:
    assert rollout_metrics([]) == {"group/mixed": 0.0} == rollout_metrics([group()])
    assert kept_metrics([], []) == {} == kept_metrics([group()], [group()])


def test_a_reward_part_may_not_take_the_name_of_a_metric() -> None:
    with pytest.raises(ValueError, match="cannot be called 'mean'"):
        rollout_metrics([group(1.0, 0.0, mean=1.0)])
