"""Every metric has a sentence; the computed ones agree with numbers worked out by hand and with brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small import scored

from grpo_cli.metrics import kept_metrics, rollout_metrics
from grpo_cli.support.errors import UserError
from grpo_cli.types import Finish, Reward, ScoredGroup


def group(*rewards: float, lengths: tuple[int, ...] = (), cut: tuple[int, ...] = (), **parts: float) -> ScoredGroup:
    replies = [(5,) * length for length in lengths or (1,) * len(rewards)]
    whole = scored(*(Reward(total, parts) for total in rewards), replies=replies)
    ends = (Finish.LENGTH if sample in cut else (Finish.EOS, Finish.STOP)[sample % 2] for sample in range(len(rewards)))
    rollouts = tuple(replace(one, finish=end) for one, end in zip(whole.rollouts, ends, strict=True))
    return replace(whole, rollouts=rollouts)


def test_rollout_metrics_are_those_worked_out_by_hand():
    first = group(1.0, 0.0, lengths=(2, 4), cut=(1,), correct=0.5)
    second = group(1.0, 1.0, 1.0, lengths=(1, 1, 7), correct=1.0, format=0.25)
    expected = {
        "reward/mean": 4 / 5,
        "reward/std": 0.4,  # values 1 1 1 1 0 about 0.8: (4 * 0.04 + 0.64) / 5 = 0.16
        "reward/correct": (2 * 0.5 + 3 * 1.0) / 5,
        "reward/format": 0.25,
        "group/zero_std": 1 / 2,
        "group/mixed": 1.0,
        **{"response/length_mean": 15 / 5, "response/length_max": 7, "response/truncated": 1 / 5},
    }
    assert rollout_metrics([first, second]) == pytest.approx(expected)
    assert rollout_metrics([group(0.1, 0.1, 0.1)])["reward/std"] == 0.0
    with pytest.raises(UserError, match="cannot be called 'mean'"):
        rollout_metrics([group(1.0, 0.0, mean=1.0)])


def test_kept_metrics_speak_of_the_kept_rollouts_alone():
    whole = [group(1.0, 0.0, 0.0, 0.0), group(1.0, 1.0, 0.0, 0.0)]
    kept = [whole[0].take([0, 1]), whole[1].take([0, 1])]
    assert kept_metrics(kept, kept) == {"reward/kept_mean": 3 / 4, "group/zero_std_kept": 1 / 2}
    assert kept_metrics([*kept, kept[1].take([0])], []) == {"group/zero_std_kept": 1 / 2}, "one alone is no group"
    assert rollout_metrics([]) == {"group/mixed": 0.0} == rollout_metrics([group()])
