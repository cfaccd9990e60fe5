"""`optim.baseline=opob`: the baseline by the norms of gradients, and what it cannot work beside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import made
import pytest
import torch
from made import composed
from small import plain_batch, small_model
from test_entropy import some_batch

from grpo_cli.config.check import check
from grpo_cli.config.choices import choices
from grpo_cli.learner.learner import Learner
from grpo_cli.learner.opob import GroupBaseline, one_by_one
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.support.meter import NullMeter
from grpo_cli.types import Batch, LossOutput, Totals


def weighted(values: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
    return LossOutput(-(batch.advantages[:, None] * batch.weights * values)[batch.loss_mask].sum(), {})


def rows_of_one_token(prompts: list[int], weights: list[float], rewards: list[float]) -> Batch:
    mask = torch.tensor([[False, True]] * len(prompts))
    return plain_batch(
        mask,
        input_ids=torch.tensor([[prompt, 9] for prompt in prompts]),
        weights=torch.tensor(weights, dtype=torch.float32)[:, None] * mask,
        advantages=torch.tensor(rewards, dtype=torch.float32),
        lengths=torch.full((len(prompts),), 2),
    )


def gradient_by_hand(batch: Batch, norms: list[float]) -> tuple[torch.Tensor, float]:
    """Of a weight for each row, whose log-probability is its norm times that."""
    theta = torch.zeros(len(batch), dtype=torch.float64, requires_grad=True)
    found = GroupBaseline([theta], weighted, Totals(1, 1, 1))
    for part in one_by_one(batch):
        (i,) = part.tolist()
        values = torch.stack([torch.zeros((), dtype=torch.float64), theta[i] * norms[i]])[None]
        found.add(values, replace(batch, **{
            name: value[part] for name, value in vars(batch).items() if isinstance(value, torch.Tensor)
        }))  # fmt: skip
    mean = found.finish()
    assert theta.grad is not None
    return theta.grad, float(mean)


def test_the_baseline_is_the_mean_by_squared_weights_and_norms() -> None:
    """w = 1, 2, 1/2, 1 and norms 1, 1/2, 2, 1 have squared products of 1, so that b is the mean of 1, 0, 1, 0. Each
    row's own gradient is -w |g| (A - b)."""
    batch = rows_of_one_token([3] * 4, [1, 2, 0.5, 1], [1, 0, 1, 0])
    gradient, mean = gradient_by_hand(batch, [1, 0.5, 2, 1])
    assert mean == pytest.approx(0.5)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, 0.5, -0.5, 0.5], dtype=torch.float64))


def test_what_moves_the_weights_most_weighs_most_and_groups_do_not_meet() -> None:
    """In one group squared norms are 9 and 1: b = (9 * 1 + 1 * 0) / 10 = .9. In the other, whose rows are not next to
    each other, 1 and 1: b = .5."""
    batch = rows_of_one_token([3, 4, 3, 4], [1, 1, 1, 1], [1, 1, 0, 0])
    gradient, mean = gradient_by_hand(batch, [3, 1, 1, 1])
    assert mean == pytest.approx(0.7)
    torch.testing.assert_close(gradient, torch.tensor([-0.3, -0.5, 0.9, 0.5], dtype=torch.float64))


def test_a_group_without_gradient_has_none() -> None:
    gradient, mean = gradient_by_hand(rows_of_one_token([3, 3], [0, 0], [1, 0]), [1, 1])
    assert mean == 0.0 and not gradient.any()


def gradients(batch: Batch, loss: Any, **optim: Any) -> tuple[dict[str, torch.Tensor], Any]:
    model, found = small_model(), dict[str, torch.Tensor]()
    words = made.optim(lr=1e-3, warmup_steps=0, max_grad_norm=1e9, **optim)
    learner = Learner(model, loss, made.model(""), Sampling.plain(16), made.train(), words, NullMeter())
    learner._optimizer.step = lambda: found.update(
        {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    )
    return found, learner.update(batch, 0)


@pytest.mark.parametrize("choice", [name for name in choices("loss") if not made.loss(name).needs_reference])
def test_the_gradient_is_that_of_advantages_less_the_baseline_which_has_the_least_variance(choice: str) -> None:
    """With every loss: b is worked out from the gradient of each row alone, and then all go through in one pass."""
    loss, batch = made.loss(choice), some_batch()
    norms = []
    for i in range(len(batch)):
        only = torch.arange(len(batch)) == i
        own, _ = gradients(replace(batch, advantages=only.float()), loss)
        norms.append(sum(float(value.double().square().sum()) for value in own.values()))
    weights, rewards = torch.tensor(norms), batch.advantages
    centred = rewards.clone()
    for group in (slice(0, 3), slice(3, 5)):
        b = float((weights[group] * rewards[group]).sum() / weights[group].sum())
        spread = [float((weights[group] * (rewards[group] - x) ** 2).sum()) for x in (b - 0.01, b, b + 0.01)]
        assert spread[1] == min(spread)
        centred[group] -= b
    expected, _ = gradients(replace(batch, advantages=centred), loss)
    found, update = gradients(batch, loss, baseline="opob")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-6)
    assert update.metrics["optim/baseline"] == pytest.approx(float((rewards - centred)[[0, 3]].mean()), rel=1e-3)
    plain, before = gradients(batch, loss)
    assert any((plain[name] - found[name]).abs().max() > 1e-4 for name in found), "it changes something"
    assert update.metrics["loss/total"] == pytest.approx(before.metrics["loss/total"], abs=1e-5)
    assert update.metrics["policy/entropy"] == pytest.approx(before.metrics["policy/entropy"], rel=1e-4)
    torch.testing.assert_close(update.logprobs, before.logprobs)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train.epochs=2", "a loss that is linear in the advantage, as it no longer is .*; use train.epochs=1"),
        ("train.minibatches=2", "use train.minibatches=1"),
        ("correction.prox=drawn", "with ratios that are 1; use correction.prox=now"),
        ("loss.kl_coef=0.1", "the distance to a reference is not; use loss.kl_coef=0"),
        ("loss=a2po", "the distance to a reference is not; .* or another loss than a2po"),
        ("correction=shadow", "this correction adds a term that is not; use correction=none"),
        ("train.padding_free=true", "they go one by one; use train.padding_free=false"),
        ("train.shared_prefix=true", "they go one by one; use train.shared_prefix=false"),
        ("record.gauges=[noise]", r"record.gauges=\[noise\] looks at half of the gradient"),
    ],
)
def test_what_it_cannot_work_beside_is_refused(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(composed("optim.baseline=opob", "logger=jsonl", words))
    check(composed("optim.baseline=opob", "logger=jsonl"))
