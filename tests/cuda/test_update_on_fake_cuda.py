"""An update on a GPU that is not there, but for the backward pass, which PyTorch begins on a real one only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import made
import pytest
import torch
from fake_cuda import CUDA, gpu, model_of
from small import scored
from test_rollouts_on_fake_cuda import SMALL, adapted

from grpo_cli.learner.batch import collate
from grpo_cli.learner.learner import Learner
from grpo_cli.model import flash
from grpo_cli.model.packed import allow_packing
from grpo_cli.native.ops import flat
from grpo_cli.settings import Sampling
from grpo_cli.support.meter import Meter


@pytest.mark.parametrize(
    ("packs", "precision", "adapters", "tokens"),
    [(False, "bfloat16", False, 28), (True, "float32", True, 28), (True, "autocast", True, 7)],
)
def test_an_update_mixes_no_devices_and_waits_thrice_whatever_it_is_cut_into(
    packs: bool, precision: str, adapters: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rollouts of three tokens of each of two prompts of four, in four micro-batches and one. The host waits for
    the metrics, the gradient's norm among them, for log-probabilities, and for whether the weights are finite; for what
    other passes find it waits once."""
    batch = collate([scored(0, 0, prompt=(place,) * 4, replies=[(1, 2, 3)] * 2) for place in range(2)])
    batch = replace(batch, advantages=torch.ones(len(batch.token_ids)))
    # Waits, but not where tensors are fake.
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", pytest.fail)
    with gpu(monkeypatch, host=True) as watched:
        model = model_of(watched, torch.bfloat16 if precision == "bfloat16" else torch.float32, **SMALL)
        allow_packing(model)  # as `load_model` does
        model = adapted(model) if adapters else model
        trained = [weight for weight in model.parameters() if weight.requires_grad]

        def backward(loss: Any) -> None:
            assert loss.device.type == "cuda" and loss.requires_grad
            for weight in trained:
                weight.grad = torch.zeros_like(weight)

        monkeypatch.setattr(torch.Tensor, "backward", backward)
        monkeypatch.setattr("grpo_cli.learner.forward.packs_rows", lambda *_: packs)
        settings = made.model("", autocast="bfloat16" if precision == "autocast" else "none")
        train = made.train(micro_batch_tokens=tokens)
        learner = Learner(model, made.loss(), settings, Sampling.plain(3), train, made.optim(), Meter(), pytest.fail)
        watched.waits.clear()
        assert learner.logprobs(model, batch).shape == (12,) and watched.waits == ["_to_copy"]
        for _ in range(2):
            watched.waits.clear()
            assert learner.update(batch, 0).moved and watched.waits == ["_to_copy", "_to_copy", "_local_scalar_dense"]


@pytest.mark.parametrize("trees", [((6, 9, 5), (10,)), ((6, 14, 10),)], ids=["two", "one"])
def test_the_kernel_of_a_gpu_is_called_as_it_is_declared(
    trees: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees and plain sequences through PyTorch's own operators, and back, without a wait. (Autograd itself wants a
    driver.)"""
    with gpu(monkeypatch) as watched, torch.no_grad():
        q, k, v = (torch.empty(30, heads, 64, device=CUDA, dtype=torch.bfloat16) for heads in (6, 2, 2))
        out, logs = flash.forward(q, k, v, flat(trees), 0.125)
        gradients = flash.backward(out, q, k, v, out, logs, flat(trees), 0.125)
    assert out.shape == q.shape and [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    assert not watched.waits
