"""The median and parts of a reward: worked numbers, and the definition in plain Python."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from bank import InOrder, Scripted, collection_of
from small import advantages_of, kept_by, plain_batch, scored
from test_predict import request, rollout

from grpo_cli.config.instantiate import make
from grpo_cli.experimental import lightning_rl, mc_grpo
from grpo_cli.experimental.oracle import Oracle
from grpo_cli.select import select
from grpo_cli.support.errors import UserError
from grpo_cli.types import Prompt, Reward, Totals


def test_the_release_divides_by_the_median_distance_and_leaves_the_middle_rollout_out():
    """Median .2, distances .2 .1 0 .3 .8, of which .2 is in the middle: each over .201."""
    group = scored(*[Reward(total) for total in (0.0, 1.0, 0.2, 0.5, 0.1)])
    release = made.advantage("median", scale="mad")
    found = select(group, [""] * 5, 4, mc_grpo.all_but_the_middle, release, np.random.default_rng(0), True)
    assert found.indices == (0, 1, 3, 4)
    assert found.advantages.tolist() == pytest.approx([-0.995025, 3.980100, 1.492537, -0.497512], abs=1e-5)
    # by the deviation, of which the variance is (.36^2 + .26^2 + .16^2 + .14^2 + .64^2) / 4 = .163
    by_deviation = advantages_of(made.advantage("median"), [0.0, 0.1, 0.2, 0.5, 1.0])
    assert by_deviation[4] == pytest.approx(0.8 / (0.163**0.5 + 0.001))


def test_a_part_counts_by_its_weight_and_not_by_its_scale():
    """Two parts of scale 1 and 100, of which each rollout has one or both: whitened both are +-.866."""
    rewards = [
        replace(reward, weights={"right": 1.0, "short": 1.0})
        for reward in (
            Reward(101.0, {"right": 1.0, "short": 100.0}),
            Reward(1.0, {"right": 1.0, "short": 0.0}),
            Reward(100.0, {"right": 0.0, "short": 100.0}),
            Reward(0.0, {"right": 0.0}),  # what it does not have is 0
        )
    ]
    per_part = partial(lightning_rl.per_part, stats_over="kept", eps=0.0)
    high = 3**0.5 / 2
    for short, times in ((1.0, [2, 0, 0, -2]), (0.5, [1.5, 0.5, -0.5, -1.5]), (0.0, [1, 1, -1, -1])):
        found = advantages_of(per_part, rewards, weights={"short": short})
        assert found == pytest.approx([high * time for time in times], abs=1e-6)


# A*-PO, ECHO's clip and mu-GRPO's veto, by hand.


def test_an_advantage_is_solved_or_not_less_the_value_whatever_the_reward_says(tmp_path: Path) -> None:
    """Half of the sampled answers were right: at beta 0.5 the value is 0.5 log((1 + e^2) / 2)."""
    answers = [("sampled", True), ("sampled", False), ("greedy", True)]
    rows = [{"prompt_id": "p", "sample": 0, "reason": reason, "solved": solved} for reason, solved in answers]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = [Reward(0.3, {"correct": 1.0}), Reward(0.9, {"correct": 0.0})]
    rule, wanted = made.advantage("a2po", answers=str(tmp_path / "samples.jsonl")), 0.5 * math.log((1 + math.e**2) / 2)
    assert advantages_of(rule, rewards) == pytest.approx([1 - wanted, -wanted])


def test_a_rollout_is_regressed_on_its_advantage() -> None:
    """Of two rollouts: log(pi / pi_ref) 1.5 and 1 in sum and advantages 0.5 and -0.5, so with beta 0.4 residuals of 0.1
    and 0.9; the second counts half."""
    weights = torch.tensor([[1.0, 1.0], [0.5, 0.5]])
    batch = plain_batch([[1, 1]] * 2, advantages=torch.tensor([0.5, -0.5]), ref_logprobs=torch.full((2, 2), -2.0))
    batch = replace(batch, weights=weights.flatten())
    policy = torch.tensor([-1.0, -1.5, -1.5, -1.5])
    loss = made.loss("a2po", beta=0.4)(policy, batch, Totals(2, 4, 2)).loss
    assert loss.item() == pytest.approx((0.1**2 + 0.5 * 0.9**2) / 2)


def test_a_reply_whose_end_is_certain_has_a_narrower_clip() -> None:
    """Of the last two tokens: probabilities 1 and 1 give 0.05 + 0.15 sigmoid(0) = 0.125, and 0.5 and 0 give
    0.05 + 0.15 sigmoid(4 * 0.75)."""
    old = torch.tensor([[-3.0, 0.0, 0.0], [-3.0, math.log(0.5), -100.0]])
    batch = plain_batch([[1, 1, 1]] * 2, old_logprobs=old)
    moved = old + torch.tensor([[0.5, 0.0, 0.0]] * 2)
    output = made.loss("echo", tail=2)(moved.flatten(), batch, Totals(2, 6, 3))
    clips = [0.05 + 0.15 / (1 + math.exp(-x)) for x in (0.0, 3.0)]
    assert output.metrics["loss/clip_mean"].item() == pytest.approx(sum(clips) / 2)
    # exp(0.5) = 1.65 is clipped; the other two ratios of each reply are 1
    assert output.loss.item() == pytest.approx(-sum(2 + 1 + clip for clip in clips) / 6)


# AERO (arXiv 2602.14338): its rounds, its choice and its baseline by hand.


def close(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-7)


# Rounds


def test_rollouts_are_made_two_at_a_time_until_the_first_success_or_the_bound() -> None:
    """Of n = 4, at most 9: p0 is solved at once, p1 by its 6th, p2 by its 9th and last, p3 never."""
    solves = {"p0": 0, "p1": 5, "p2": 8, "p3": 99}
    bank = Scripted(lambda r: r.sample == solves[r.prompt.id])
    collection = collection_of(bank, InOrder([Prompt(name, (0,), "") for name in solves]), n=4, prompts=4)
    groups = collection.run(make("collector", made.part("collector", "aero", most=9)))
    metrics = collection.metrics()
    assert [len(group.rollouts) for group in groups] == [4, 6, 9, 9]
    asked = [Counter(request.prompt.id for request in requests) for requests in bank.rounds]
    assert asked[1:] == [{"p1": 2, "p2": 2, "p3": 2}, {"p2": 2, "p3": 2}, {"p2": 1, "p3": 1}]
    assert len(bank.judged) == 28 and len({request.seed for request in bank.judged}) == 28, "each is judged once"
    assert metrics["collect/later_rounds"] == pytest.approx(12 / 28) and metrics["collect/unsolved"] == 1.0


# The choice


@pytest.mark.parametrize(
    ("right", "wrong", "k", "expected"),
    [
        (1, 31, 1.0, (1, 1)),
        (2, 30, 1.5, (2, 3)),
        (0, 32, 1.0, (0, 1)),  # as of one right answer
        (12, 20, 1.0, (4, 4)),  # 24 are more than 8: half and half
        (30, 2, 1.0, (6, 2)),
        (32, 0, 1.0, (8, 0)),
    ],
)
def test_all_right_answers_and_some_wrong_ones_are_kept_of_32_at_most_8(right, wrong, k, expected) -> None:
    rule = make("downsample", made.part("downsample", "aero", k=k))
    group = kept_by(rule, scored(*[1.0] * right, *[0.0] * wrong), 8, np.random.default_rng(0))
    assert (group.solved, len(group.rollouts) - group.solved) == expected


# The baseline


def test_the_baseline_is_the_posterior_mean() -> None:
    """2 of 8 right, Beta(1, 1): 3/10. Of the 3 kept, 1 right: 2/5. Beta(1/2, 3/2) and 8: 2.5/10."""
    rewards, kept = [1.0, 1.0, *[0.0] * 6], [0, 6, 7]
    assert advantages_of(made.advantage("beta"), rewards, kept) == close([0.7, -0.3, -0.3])
    assert advantages_of(made.advantage("beta", stats_over="kept"), rewards, kept) == close([0.6, -0.4, -0.4])
    prior = made.advantage("beta", prior_right=0.5, prior_wrong=1.5)
    assert advantages_of(prior, rewards, kept) == close([0.75, -0.25, -0.25])


# A predictor of the lengths that an earlier run recorded.


def trace_file(folder: Path, rows: Sequence[tuple[int, str, int, int]]) -> Path:
    path, names = folder / "rollouts.jsonl", ("step", "prompt_id", "sample", "length")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True)) | {"reply": "x"}) + "\n" for row in rows))
    return path


def test_a_prompt_gets_the_lengths_of_its_recorded_steps_in_turn_also_after_a_resume(tmp_path: Path) -> None:
    path = trace_file(tmp_path, [(4, "a", 0, 40), (1, "a", 1, 12), (1, "a", 0, 10), (4, "a", 1, 42), (1, "b", 0, 11)])
    predictor, both = Oracle(path), [request("a"), request("a", 1)]
    assert predictor.predict([*both, request("b")], None) == [10.0, 12.0, 11.0]
    predictor.learn([rollout(one, 10) for one in both], None)
    resumed = Oracle(path)
    resumed.load_state(json.loads(json.dumps(predictor.state())))
    for one in (predictor, resumed):
        assert one.predict(both, None) == [40.0, 42.0]
        with pytest.raises(UserError, match="sample 2 of prompt a .*record.rollouts=-1"):
            one.predict([request("a"), request("a", 2)], None)
        assert one.predict([request("not recorded")], None) is None
        assert one.predict([replace(request("a"), held_out=True)], None) is None
