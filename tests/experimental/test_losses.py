"""A*-PO, ECHO's clip and mu-GRPO's veto, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import made
import pytest
import torch
from small import advantages_of, plain_batch

from grpo_cli.types import Reward, Totals


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
