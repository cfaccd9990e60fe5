"""An update on a GPU that is not there, but for the backward pass, which PyTorch begins on a real one only."""

from __future__ import annotations

from contextlib import nullcontext

import made
import pytest
import torch
from fake_cuda import CUDA, gpu, model_of
from test_rollouts_on_fake_cuda import SMALL, adapted

from grpo_cli.learner.logprobs import chosen_logprobs, logprobs_at
from grpo_cli.learner.optimizer import make_optimizer
from grpo_cli.model.packed import Tree, allow_packing, packed_hidden
from grpo_cli.types import Batch, Totals


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("precision", ["bfloat16", "float32", "autocast"])
@pytest.mark.parametrize("trees", [None, [Tree(7)] * 4, [Tree(4, (3, 3))] * 2])
def test_an_update_mixes_no_devices_and_no_types(
    trees: list[Tree] | None, precision: str, adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rollouts of three tokens of each of two prompts of four: padded, packed, and with prompts in common."""
    loss = made.loss()
    with gpu(monkeypatch) as watched:
        model = model_of(watched, torch.bfloat16 if precision == "bfloat16" else torch.float32, **SMALL)
        model = adapted(model) if adapters else model
        with CUDA:
            ids, places, cells = torch.zeros(4, 7, dtype=torch.long), torch.ones(12, dtype=torch.long), torch.ones(4, 7)
        with torch.autocast("cuda", torch.bfloat16) if precision == "autocast" else nullcontext():
            if trees is None:
                chosen = logprobs_at(model, ids, places, places, 1.0, 8)
            else:
                allow_packing(model)
                states = packed_hidden(model, ids.view(-1)[: sum(map(len, trees))], trees)
                chosen = chosen_logprobs(model, states[places], places, 1.0, 8)
        values, mask = torch.zeros_like(cells).index_put((places, places), chosen), cells.bool()
        part = Batch(ids, mask, mask, cells, cells, None, None, cells[:, 0], ids[:, 0])
        output = loss(values, part, Totals(4, 12, 8))
        assert output.loss.device.type == "cuda" and output.loss.requires_grad
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = make_optimizer(trained, made.optim())
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    assert all(state["exp_avg"].device.type == "cuda" for state in optimizer.state.values())
