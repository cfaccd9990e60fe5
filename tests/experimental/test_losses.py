"""A*-PO, ECHO's clip and mu-GRPO's veto, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from bank import Scripted
from small import advantages_of, plain_batch

from grpo_cli.interfaces import Runtime
from grpo_cli.support.errors import UserError
from grpo_cli.types import Prompt, Reward, Totals


def answers_in(folder: Path, rows: Any) -> str:
    file = folder / "samples.jsonl"
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(file)


def answer(solved: bool, reason: str = "sampled", problem: str = "p") -> dict[str, Any]:
    return {"prompt_id": problem, "sample": 0, "reason": reason, "solved": solved}


def test_an_advantage_is_solved_or_not_less_the_value_whatever_the_reward_says(tmp_path: Path) -> None:
    """Half of the sampled answers were right: at beta 0.5 the value is 0.5 log((1 + e^2) / 2)."""
    file = answers_in(tmp_path, [answer(True), answer(False), answer(True, "greedy")])
    rewards = [Reward(0.3, {"correct": 1.0}), Reward(0.9, {"correct": 0.0})]
    rule, wanted = made.advantage("a2po", answers=file), 0.5 * math.log((1 + math.e**2) / 2)
    assert advantages_of(rule, rewards) == pytest.approx([1 - wanted, -wanted])
    other = Scripted()
    other.prompts = lambda split: [Prompt("q", (0,), "")]  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"advantage.answers=.* has no answer to q"):
        rule.setup(Runtime(torch.device("cpu"), None, None, 0, other, other))


@pytest.mark.parametrize(
    "rows",
    [[], ["{"], ["3\n"], [answer(True, "greedy")]],
    ids=lambda rows: str(rows)[:20],
)
def test_another_file_is_refused(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="advantage.answers=.*eval.split=train"):
        made.advantage("a2po", answers=answers_in(tmp_path, rows))


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


def test_mu_grpo_by_hand():
    """Ratios 1, 3, 1, 1/3 and a clip too wide to act. With A = -2 what follows the 3 adds nothing, and the 3 itself
    does; with A = 1 all do. The third reply begins with 1/3, which is below 1 / 2.9."""
    ratios = torch.tensor([1.0, 3.0, 1.0, 1 / 3])
    logprobs = torch.stack([ratios, ratios, ratios.flip(0)]).log()
    batch = plain_batch(torch.ones(3, 4), advantages=torch.tensor([-2.0, 1.0, -1.0]), old_logprobs=torch.zeros(3, 4))
    leaf = logprobs.flatten().requires_grad_()
    output = made.loss("mu_grpo", clip_low=1.0, clip_high=9.0, veto=2.9)(leaf, batch, Totals(3, 12, 4))
    output.loss.backward()
    gradient, metrics = leaf.grad, output.metrics
    assert output.loss.item() == pytest.approx(((2 + 6) - (1 + 3 + 1 + 1 / 3) + 1 / 3) / 4 / 3)
    wanted = [[2, 6, 0, 0], [-1, -3, -1, -1 / 3], [1 / 3, 0, 0, 0]]
    torch.testing.assert_close(gradient.reshape(3, 4) * 12, torch.tensor(wanted))
    assert metrics["loss/clip_fraction"].item() == pytest.approx(5 / 12)
