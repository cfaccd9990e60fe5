"""One optimizer step: its rate, its gradient's bound, the mode that the model is in, and what of AdamW is saved."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import made
import pytest
import torch
from small import plain_batch, small_model
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_cli.learner.learner import Learner
from grpo_cli.learner.logprobs import chosen_logprobs
from grpo_cli.learner.optimizer import make_optimizer, move_state
from grpo_cli.model.anatomy import head
from grpo_cli.model.load import load_model
from grpo_cli.settings import Sampling
from grpo_cli.support.meter import Meter
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
    return Learner(model, loss, made.model(""), Sampling.plain(4), train, made.optim(**(words | optim)), Meter())


def test_the_first_step_of_adamw_moves_a_weight_by_the_rate_of_its_step():
    """With averages of one gradient g the step is rate * g / |g|, whatever the size of g."""
    model = small_model()
    before = [weight.detach().clone() for weight in model.parameters()]
    update = (learner := make_learner(model, warmup_steps=2)).update(make_batch(), 0)
    farthest = max(float((new.detach() - old).abs().max()) for old, new in zip(before, model.parameters(), strict=True))
    assert update.metrics["optim/lr"] == 0.125 and farthest == pytest.approx(0.125, rel=1e-3)
    assert [learner.update(make_batch(), step).metrics["optim/lr"] for step in (0, 1)] == [0.125, 0.25]


def test_the_gradient_that_the_optimizer_gets_is_bounded_and_the_metric_is_not():
    model, norms = small_model(), list[float]()
    learner = make_learner(model, max_grad_norm=0.5)
    watch = lambda: norms.append(float(torch.nn.utils.get_total_norm([w.grad for w in model.parameters()])))  # noqa: E731
    learner._optimizer.step = watch
    first, second = (learner.update(make_batch(), 0).metrics["optim/grad_norm"] for _ in range(2))
    assert norms == pytest.approx([0.5, 0.5], rel=1e-3)
    assert first == second > 1.0, "none is left over from the update before"


def test_a_loss_is_not_called_for_a_pass_without_a_token_to_train_on():
    batch, called = make_batch(), list[int]()
    loss = lambda logprobs, part, _: (called.append(int(part.loss_mask.sum())), steep(logprobs, part, _))[1]  # noqa: E731
    masked = replace(batch, loss_mask=batch.loss_mask & batch.per_token(torch.tensor([True, False])))
    whole = make_learner(small_model(), loss, tokens=1).update(masked, 0)
    assert called == [2] and whole.stepped and len(whole.logprobs) == 3


def test_a_head_with_dropout_goes_back_by_the_mask_of_its_forward_pass():
    pytest.importorskip("peft")
    words = replace(made.model(), lora=made.lora(rank=2, dropout=0.5, targets=("lm_head",)))
    model, ids = load_model(words, torch.device("cpu")).train(), torch.arange(2, 42)
    for weight in (weight for weight in model.parameters() if weight.requires_grad):
        weight.data += torch.randn_like(weight)
    states, found = torch.randn(40, model.config.hidden_size, requires_grad=True), list[torch.Tensor]()
    whole = lambda: head(model)(states).log_softmax(-1).gather(1, ids[:, None])[:, 0]  # noqa: E731
    for values_of in (whole, lambda: chosen_logprobs(model, states, ids, 1.0, 40)):
        torch.manual_seed(0)
        found += torch.autograd.grad((values := values_of()).sum(), states)
        found.append(values.detach())
    assert torch.allclose(found[0], found[2], atol=1e-5) and torch.allclose(found[1], found[3], atol=1e-5)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_dropout_of_adapters_and_recomputation_are_of_updates_alone(checkpointing):
    pytest.importorskip("peft")
    words = replace(made.model(), lora=made.lora(rank=2, dropout=0.5), gradient_checkpointing=checkpointing)
    model = load_model(words, torch.device("cpu"))
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight) * weight.requires_grad
    ids, calls = torch.arange(2, 12)[None], list[bool]()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
        assert not torch.equal(model.train()(input_ids=ids).logits, model(input_ids=ids).logits)
    model.get_base_model().model.layers[0].mlp.register_forward_pre_hook(lambda layer, _: calls.append(layer.training))
    make_learner(model.eval()).update(make_batch(), 0)
    assert calls == [True] * (1 + (checkpointing == "full")) and not model.training


def same_state(one: Any, other: Any) -> bool:
    pairs = zip(one["state"].values(), other["state"].values(), strict=True)
    return all(torch.equal(old[name], new[name]) for old, new in pairs for name in old | new)


@pytest.mark.parametrize("factor", [0.0, 1e-30])
def test_a_gradient_of_zero_is_no_update_and_one_whose_norm_is_too_small_for_a_number_is(factor):
    """AdamW would move weights by its averages of earlier gradients and by its decay, and steps by the sign of a
    gradient of any size; the square of 1e-30 is 0 in float32."""
    model, factors = small_model(), [1.0, factor]
    loss = lambda logprobs, *_: LossOutput(factors[0] * logprobs.sum(), {})  # noqa: E731
    learner = make_learner(model, loss, weight_decay=0.5, eps=1e-38)
    assert learner.update(make_batch(), 0).stepped
    before, state = [weight.detach().clone() for weight in model.parameters()], copy.deepcopy(learner.state_dict())
    factors.pop(0)
    update = learner.update(make_batch(), 1)
    moved = factor > 0
    assert (update.stepped, update.fault, update.metrics["optim/grad_norm"]) == (moved, None, 0.0)
    assert learner.updates == 1 + moved and same_state(learner.state_dict(), state) != moved
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)) != moved


@pytest.mark.parametrize("offload", [False, True])
def test_averages_come_back_and_the_settings_of_a_resumed_run_are_those_that_are_given(offload):
    """Without an average of gradients (betas 0) and with no gradient to speak of beside eps, all that acts is decay, of
    matrices alone: 1 - 0.25 * 0.4."""
    model = small_model()
    first = make_learner(model, offload=offload)
    first.update(make_batch(), 0)
    state, again = copy.deepcopy(first.state_dict()), copy.deepcopy(model)
    second = make_learner(again, weight_decay=0.4, betas=(0.0, 0.5), eps=1e9, offload=offload)
    second.load_state_dict(state)
    assert state["state"] and same_state(second.state_dict(), state)
    before = {name: weight.detach().clone() for name, weight in again.named_parameters()}
    second.update(make_batch(), 0)
    for name, weight in again.named_parameters():
        stays = 1.0 if name.endswith(("bias", "norm.weight")) else 0.9
        torch.testing.assert_close(weight.detach(), stays * before[name], atol=1e-6, rtol=0)
    assert all(float(one["step"]) == 2.0 for one in second.state_dict()["state"].values())


def test_parked_state_goes_from_a_gpu_to_the_host_and_comes_back(monkeypatch):
    """Fake tensors: devices and shapes. What is pinned is requested, and a fake GPU has none to pin."""
    plain, pinned = torch.empty_like, list[bool]()
    with FakeTensorMode():
        weights = [torch.zeros(*size, device="cuda", requires_grad=True) for size in ((8, 8), (8,))]
        optimizer = make_optimizer(weights, made.optim())
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()

        def places() -> list[str]:
            return [value.device.type for one in optimizer.state.values() for value in one.values()]

        def empty_like(value: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
            pinned.append(pin_memory)
            return plain(value, device=device)

        monkeypatch.setattr(torch, "empty_like", empty_like)
        for _ in range(2):  # what is there stays there
            move_state(optimizer, to_host=True)
            assert places() == ["cpu"] * 6 and pinned == [True] * 6
        move_state(optimizer, to_host=False)
        assert places() == ["cuda"] * 6
