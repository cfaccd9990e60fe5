"""One optimizer step: its rate, its gradient's bound, and the mode that the model is in."""

from __future__ import annotations

import copy
import math
from typing import Any

import made
import pytest
import torch
from small import plain_batch, small_model

from grpo_cli.learner.learner import Learner
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.support.meter import NullMeter
from grpo_cli.types import Batch, LossOutput, Totals


def make_batch() -> Batch:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])
    mask = [[False, False, True, True], [False, False, True, False]]
    return plain_batch(mask, input_ids=ids, advantages=torch.tensor([1.0, -1.0]))


def steep(logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
    return LossOutput(-1000.0 * logprobs.sum(), {})


def make_learner(model: Any, loss: Any = steep, tokens: int = 10_000, **optim: Any) -> Learner:
    words: dict[str, Any] = dict(lr=0.25, warmup_steps=0)
    train = made.train(micro_batch_tokens=tokens, logprob_chunk=64)
    return Learner(model, loss, made.model(""), Sampling.plain(4), train, made.optim(**(words | optim)), NullMeter())


@pytest.mark.parametrize(("words", "step", "rate"), [({}, 3, 0.25), ({"warmup_steps": 2}, 0, 0.125)], ids=str)
def test_the_first_step_of_adamw_moves_a_weight_by_the_rate_of_its_step(
    words: dict[str, Any], step: int, rate: float
) -> None:
    """With averages of one gradient g the step is rate * g / |g|, whatever the size of g."""
    model = small_model()
    before = [weight.detach().clone() for weight in model.parameters()]
    update = make_learner(model, **words).update(make_batch(), step)
    farthest = max(float((new.detach() - old).abs().max()) for old, new in zip(before, model.parameters(), strict=True))
    assert update.metrics["optim/lr"] == rate and farthest == pytest.approx(rate, rel=1e-3)


def test_the_gradient_that_the_optimizer_gets_is_bounded_and_the_metric_is_not() -> None:
    model = small_model()
    learner = make_learner(model, max_grad_norm=0.5)
    norms: list[float] = []

    def watch() -> None:
        gradients = [w.grad for w in model.parameters() if w.grad is not None]
        norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))

    learner._optimizer.step = watch
    update = learner.update(make_batch(), 0)
    assert norms == pytest.approx([0.5], rel=1e-3) and update.metrics["optim/grad_norm"] > 1.0


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_weights_that_are_not_finite_after_an_update_are_said_with_what_did_it(bad: float) -> None:
    """One update with a weight decay that was infinite made every weight NaN, and the engine was blamed for it."""
    model = small_model()
    learner = make_learner(model, weight_decay=0.5)
    learner._optimizer.step = lambda: model.lm_head.weight.data[3, 1:2].fill_(bad)
    with pytest.raises(
        UserError, match=r"step 8: after the update .* not finite \(optim\.lr=0\.25, .*weight_decay=0\.5"
    ):
        learner.update(make_batch(), 7)


def test_no_gradient_is_left_over_for_the_next_update() -> None:
    """The same batch twice, without a step between, has the same gradient; a left-over one would double it."""
    learner = make_learner(small_model())
    learner._optimizer.step = lambda: None
    first, second = (learner.update(make_batch(), 0).metrics["optim/grad_norm"] for _ in range(2))
    assert first == second


def test_the_model_trains_in_training_mode_and_samples_in_evaluation_mode() -> None:
    model, modes = small_model(), list[bool]()

    def watched(logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
        modes.append(model.training)
        return steep(logprobs, batch, totals)

    make_learner(model, watched).update(make_batch(), 0)
    assert modes == [True] and not model.training


def weights_of(model: Any) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


def unmoved(model: Any, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def flat(logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
    return LossOutput(0.0 * logprobs.sum(), {})


def test_a_gradient_of_zero_is_no_update() -> None:
    """AdamW would move every weight, by its averages of earlier gradients and by its decay."""
    losses = [steep, flat]
    model = small_model()
    learner = make_learner(model, lambda *words: losses[0](*words), weight_decay=0.5)
    assert learner.update(make_batch(), 0).moved
    before, averages = weights_of(model), copy.deepcopy(learner.state_dict())
    losses.pop(0)
    update = learner.update(make_batch(), 1)
    assert (update.moved, update.fault, update.metrics["optim/grad_norm"], learner.updates) == (False, None, 0.0, 1)
    assert unmoved(model, before)
    for old, new in zip(averages["state"].values(), learner.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_a_gradient_whose_norm_is_too_small_for_a_number_is_still_one() -> None:
    """The square of 1e-30 is 0 in float32; AdamW steps by the sign of a gradient of any size."""
    model = small_model()
    before = weights_of(model)

    def faint(logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
        return LossOutput(1e-30 * logprobs.sum(), {})

    update = make_learner(model, faint, eps=1e-38).update(make_batch(), 0)
    assert update.metrics["optim/grad_norm"] == 0.0 and update.moved and not unmoved(model, before)
