"""AdamW as it is asked for: what decays, what a checkpoint brings back of it, and what it does not."""

from __future__ import annotations

import copy
from typing import Any

import made
import pytest
import torch
from small import small_model
from test_adapters import settings as with_lora
from test_learner import make_batch, make_learner

from grpo_cli.learner.optimizer import make_optimizer
from grpo_cli.model.adapters import with_adapters

OFFLOAD = pytest.mark.parametrize("offload", [False, True])


def optimizer_of(model: Any, **words: Any) -> Any:
    optim = made.optim(lr=0.1, **words)
    return make_optimizer([weight for weight in model.parameters() if weight.requires_grad], optim)


@OFFLOAD
def test_matrices_decay_and_norms_and_biases_do_not(offload: bool) -> None:
    """A step of rate 0.1 with decay 0.5 and no gradient multiplies a weight by 1 - 0.1 * 0.5, or leaves it alone."""
    model = small_model()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = optimizer_of(model, weight_decay=0.5, offload=offload)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    stayed = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert stayed == {name for name in before if name.endswith(("bias", "norm.weight"))} and len(stayed) == 2 * 5 + 1
    for name, weight in model.named_parameters():
        if name not in stayed:
            torch.testing.assert_close(weight.detach(), 0.95 * before[name], atol=0, rtol=1e-6)
    assert "model.embed_tokens.weight" not in stayed


def test_adapters_decay_whole() -> None:
    pytest.importorskip("peft")
    optimizer = optimizer_of(with_adapters(small_model(), with_lora()), weight_decay=0.5)
    assert [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups] == [(20, 0.5)]


@OFFLOAD
def test_the_settings_of_a_resumed_run_are_those_that_are_given(offload: bool) -> None:
    """Without an average of gradients (betas 0) and with no gradient to speak of beside eps, all that acts is decay."""
    model = small_model()
    first = make_learner(model, offload=offload)
    first.update(make_batch(), 0)
    state, again = copy.deepcopy(first.state_dict()), copy.deepcopy(model)
    second = make_learner(again, weight_decay=0.4, betas=(0.0, 0.5), eps=1e9, offload=offload)
    second.load_state_dict(state)
    matrix = again.model.layers[0].mlp.up_proj.weight
    before = matrix.detach().clone()
    second.update(make_batch(), 0)
    torch.testing.assert_close(matrix.detach(), 0.9 * before, atol=1e-6, rtol=0)  # 1 - 0.25 * 0.4
    words = [(group["betas"], group["eps"], group["weight_decay"]) for group in second.state_dict()["param_groups"]]
    assert words == [((0.0, 0.5), 1e9, 0.4), ((0.0, 0.5), 1e9, 0.0)]
    assert all(float(one["step"]) == 2.0 for one in second.state_dict()["state"].values())


def test_averages_come_back() -> None:
    model = small_model()
    first = make_learner(model)
    first.update(make_batch(), 0)
    second = make_learner(copy.deepcopy(model), eps=1e-3)
    second.load_state_dict(first.state_dict())
    assert first.state_dict()["state"]
    for old, new in zip(first.state_dict()["state"].values(), second.state_dict()["state"].values(), strict=True):
        assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
