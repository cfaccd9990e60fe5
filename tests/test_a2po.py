"""A*-PO: a value by hand, the advantage that it makes, and the regression, whose gradient is that of a regularised
reward."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from made import configuration
from small import advantages_of, plain_batch, scored
from test_config import refusal

from grpo_cli.config.compose import settings_of
from grpo_cli.experiment import build
from grpo_cli.history import PROFILED, History, Visit
from grpo_cli.methods.a2po import value
from grpo_cli.model.load import load_tokenizer
from grpo_cli.profile.command import _never_all_equal
from grpo_cli.rules.loss import Clipped
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import taken
from grpo_cli.types import AdvantageInputs, Reward, Totals


def test_a_value_by_hand() -> None:
    """Of answers of which 1 of 4 is right: log((3 + e) / 4) at beta 1, near the best of them at a small beta and near
    their mean at a large one."""
    assert value(Visit(PROFILED, 1, 4), 1.0) == pytest.approx(math.log((3 + math.e) / 4))
    assert value(Visit(PROFILED, 1, 4), 1e-4) == pytest.approx(1.0, abs=2e-4)
    assert value(Visit(PROFILED, 1, 4), 1e3) == pytest.approx(0.25, abs=1e-3)
    assert value(Visit(PROFILED, 0, 4), 0.5) == 0.0 and value(Visit(PROFILED, 4, 4), 0.5) == 1.0


def test_an_advantage_is_solved_or_not_less_the_value_whatever_the_reward_says() -> None:
    """Half of the answers were right: at beta 0.5 the value is 0.5 log((1 + e^2) / 2)."""
    rewards = [Reward(0.3, {"correct": 1.0}), Reward(0.9, {"correct": 0.0})]
    group = scored(*rewards)
    history = History({"p": [Visit(PROFILED, 2, 4), Visit(3, 0, 8)]})  # what training has seen since is of no account
    rule = partial(made.advantage("a2po"), history=history)
    totals = torch.tensor([0.3, 0.9])
    found = advantages_of(rule, totals, totals, AdvantageInputs(group, (0, 1), (0, 1)))
    wanted = 0.5 * math.log((1 + math.e**2) / 2)
    torch.testing.assert_close(found, torch.tensor([1 - wanted, -wanted]))
    alone = advantages_of(rule, totals[1:], totals[1:], AdvantageInputs(group, (1,), (1,)))
    torch.testing.assert_close(alone, torch.tensor([-wanted]))
    with pytest.raises(UserError, match=r"train.history does not know q: .* grpo eval"):
        advantages_of(rule, totals, totals, AdvantageInputs(scored(*rewards, name="q"), (0, 1), (0, 1)))


def test_a_profile_hands_it_what_a_run_does() -> None:
    group, totals = scored(Reward(1.0), Reward(0.0)), torch.tensor([1.0, 0.0])
    rule = partial(_never_all_equal, made.advantage("a2po"))
    given = taken(rule, history=History({"p": [Visit(PROFILED, 0, 4)]}))
    assert advantages_of(partial(rule, **given), totals, totals, AdvantageInputs(group, (0, 1), (0, 1))).tolist() == [
        1,
        0,
    ]


def test_the_regression_by_hand() -> None:
    """Log-ratios of 3 and -1 in all, beta 0.5, advantages 1 and 2: (1.5 - 1)^2 and (-0.5 - 2)^2."""
    logprobs = torch.tensor([[-1.0, -2.0, 9.0], [-4.0, -1.0, -1.0]], requires_grad=True)
    batch = plain_batch([[1, 1, 0], [1, 1, 1]], advantages=torch.tensor([1.0, 2.0]))
    batch = replace(batch, ref_logprobs=torch.tensor([[-2.0, -4.0, 0.0], [-1.0, -2.0, -2.0]]))
    output = made.loss("a2po", beta=0.5)(logprobs, batch, Totals(2, 5, 3))
    output.loss.backward()
    assert output.loss.item() == pytest.approx((0.25 + 6.25) / 2)
    wanted = torch.tensor([[0.5, 0.5, 0.0], [-2.5, -2.5, -2.5]]) * 2 * 0.5 / 2
    torch.testing.assert_close(logprobs.grad, wanted)
    parts = [replace(batch, **{n: v[i : i + 1] for n, v in vars(batch).items() if v is not None}) for i in (0, 1)]
    shares = [made.loss("a2po", beta=0.5)(logprobs[i : i + 1], part, Totals(2, 5, 3)) for i, part in enumerate(parts)]
    assert sum(share.loss.item() for share in shares) == pytest.approx(3.25)
    assert not isinstance(made.loss("a2po"), Clipped)


def test_the_gradient_is_that_of_the_regularised_reward_and_0_at_its_best_policy() -> None:
    """A table policy of two tokens of three ids, in float64: over all nine sequences by their probabilities the mean
    gradient is that of 2 beta (beta KL(pi || pi_ref) - reward), whatever the value, and at pi_ref exp(r / beta) / Z,
    with V* = beta log Z, every residual is 0."""
    generator, beta = torch.Generator().manual_seed(0), 0.4
    start, now = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    sequences = torch.tensor(list(product(range(3), repeat=2)))
    rewards = (torch.arange(9) % 2).double()

    def logs(table: torch.Tensor) -> torch.Tensor:  # the second token's row of the table is the first token
        first, second = table[:3].log_softmax(0), table[3:].view(3, 3).log_softmax(1)
        return torch.stack([first[sequences[:, 0]], second[sequences[:, 0], sequences[:, 1]]], dim=1)

    reference, loss = logs(start), made.loss("a2po", beta=beta)
    optimal = beta * torch.logsumexp(reference.sum(1) + rewards / beta, 0)

    def mean_gradient(baseline: Any) -> torch.Tensor:
        table = now.clone().requires_grad_()
        said = logs(table)
        chance = said.sum(1).exp().detach()
        for row in range(9):
            batch = plain_batch([[1, 1]], advantages=rewards[row : row + 1] - baseline)
            batch = replace(batch, ref_logprobs=reference[row : row + 1])
            share = loss(said[row : row + 1], batch, Totals(1, 2, 2)).loss
            (chance[row] * share).backward(retain_graph=True)
        return table.grad

    table = now.clone().requires_grad_()
    said = logs(table).sum(1)
    (2 * beta * (said.exp() * (beta * (said - reference.sum(1)) - rewards)).sum()).backward()
    for baseline in (optimal, 0.0, 7.0):
        torch.testing.assert_close(mean_gradient(baseline), table.grad, atol=2e-5, rtol=1e-4)
    best = reference.clone()
    best[:, 1] += (rewards - optimal) / beta  # of the sequence as a whole
    batch = replace(plain_batch(torch.ones(9, 2), advantages=rewards - optimal), ref_logprobs=reference)
    assert float(loss(best, batch, Totals(9, 18, 2)).loss) < 1e-10


@pytest.mark.parametrize(
    ("words", "key", "way_out"),
    [
        ("loss=a2po", "loss=a2po", "advantage=a2po n=1"),
        ("loss=a2po advantage=a2po n=1", "advantage=a2po", "grpo eval eval.split=train"),
        ("loss=a2po advantage=a2po train.history=nowhere.jsonl", "train.history=nowhere.jsonl", "grpo eval"),
        ("n=1", "n=1", "advantage=a2po"),
        ("loss=mu_grpo loss.veto=1", "loss.veto=1", "more than 1"),
    ],
)
def test_what_cannot_work_is_refused_with_a_way_out(words: str, key: str, way_out: str) -> None:
    said = refusal(*words.split())
    assert key in said and way_out in said


def test_a_run_learns_from_one_rollout_of_each_problem(tmp_path: Path) -> None:
    """Half of the problems were always solved before (V* = 1), the others never (V* = 0)."""
    prompts = made.task("arithmetic", load_tokenizer(made.model()), train_problems=8).prompts("train")
    rows = [
        {"prompt_id": prompt.id, "sample": sample, "reason": "sampled", "solved": place % 2 == 0}
        for place, prompt in enumerate(prompts)
        for sample in range(2)
    ]
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["loss=a2po", "advantage=a2po", "n=1", "task.train_problems=8", "train.prompts=8", f"train.history={file}"]
    words += ["logger=jsonl", "train.steps=1", "eval.every=0", "record.rollouts=-1", f"run_dir={tmp_path / 'run'}"]
    assert configuration(*words[:3])["loss"]["beta"] == 1e-3
    summary = build(settings_of(*words)).fit()
    assert summary["status"] == "completed"
    made_rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    solved_before = {prompt.id: place % 2 == 0 for place, prompt in enumerate(prompts)}
    assert len(made_rows) == 8
    step = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert step["group/zero_std"] == 0, "a rollout that is alone is no group of equal rewards"
    for row in made_rows:
        assert row["advantage"] == pytest.approx(row["solved"] - solved_before[row["prompt_id"]], abs=1e-6)
