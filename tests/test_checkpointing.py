"""Little is kept for the backward pass, and gradients have the bits that they have where everything is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import made
import pytest
import torch
from small import VOCABULARY, small_model
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from grpo_cli.memory.shapes import ACTIVATIONS, Allocations
from grpo_cli.model import checkpointing
from grpo_cli.model.adapters import with_adapters
from grpo_cli.model.anatomy import unwrapped
from grpo_cli.model.checkpointing import last_states, recompute_layers
from grpo_cli.model.packed import packed_hidden

IDS = torch.randint(2, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_memory_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "little_bytes", lambda: 0)


def recomputing(what: str, family: str = "llama", lora: Any = None, **words: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = with_adapters(small_model(family, **words), replace(made.model(), lora=lora or made.lora()))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    if what != "none":
        recompute_layers(unwrapped(model), what)
    return model.train()


def gradients(model: Any, run: Callable[[Any], Tensor], autocast: bool = False) -> list[Tensor]:
    torch.manual_seed(1)  # of dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        states = run(model)
    (states * torch.arange(32)).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("family", "dtype", "lora", "autocast"),
    [
        ("llama", torch.float32, None, True),
        ("qwen3", torch.float32, None, False),
        ("qwen2", torch.bfloat16, None, False),
        ("llama", torch.float32, made.lora(rank=2, dropout=0.5), True),
    ],
    ids=["autocast", "float32", "bfloat16", "dropout"],
)
def test_gradients_have_the_same_bits(family, dtype, lora, autocast):
    """Of rows by themselves, and of a run of trees."""
    runs: list[Any] = [partial(last_states, input_ids=IDS)]
    runs += [partial(packed_hidden, input_ids=IDS.flatten(), trees=[(10, 20, 30)], natively=False)]
    for run in runs:
        everything, *less = (
            gradients(recomputing(what, family, lora).to(dtype), run, autocast)
            for what in ("none", "elementwise", "full")
        )
        for little in less:
            assert len(little) == len(everything) and any(g.any() for g in little)
            assert all(map(torch.equal, little, everything))


def kept(model: Any, autocast: bool = False) -> float:
    """Numbers of 4 bytes that are kept of a pass, for each token."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Allocations(model) as allocations:
        states = last_states(model, input_ids=IDS)
        allocations.take_peak()
        found = allocations.take_peak()[ACTIVATIONS]
        del states
    return found / IDS.numel() / 4


def test_what_is_kept_is_what_products_and_attention_make():
    """Of a layer: its input (32 numbers of a token), q, k, v (32 + 16 + 16), attention (32, and 4 heads' sums), what
    o_proj, gate_proj and up_proj give (32 + 64 + 64); after the last one its residual, that over the norm's factor, the
    factor, and the result. Beside: cosines and sines (2 x 8) of a row's positions, and these (2)."""
    layer, last, rotation = 32 + 32 + 16 + 16 + 32 + 4 + 32 + 64 + 64, 3 * 32 + 1, 18 / 3
    assert kept(recomputing("elementwise")) == pytest.approx(2 * layer + last + rotation)
    assert kept(recomputing("full")) == pytest.approx(2 * 32 + last + rotation)
    assert kept(recomputing("none")) > 1.5 * kept(recomputing("elementwise"))


def test_neither_copies_of_weights_nor_the_products_of_adapters_are_kept():
    wide = recomputing("elementwise", hidden_size=256, intermediate_size=1024)
    assert kept(wide, autocast=True) * 4 * IDS.numel() < sum(p.nbytes // 2 for p in wide.parameters())
    plain, adapted = (kept(recomputing("elementwise", lora=lora)) for lora in (None, made.lora(rank=2)))
    assert adapted - plain <= 2 * 7 * 2 + 1  # of each product the two numbers between its adapter's halves


@pytest.mark.parametrize("lora", [None, made.lora(rank=2)], ids=["whole", "adapters"])
def test_offloaded_are_the_inputs_of_layers_alone_and_no_gradient_changes(lora):
    """Two layers, three rows of 20 tokens, 32 numbers each: that is what leaves the device, and what comes back."""
    gone, back = list[Any](), list[Any]()

    def moved(seen: list[Any], tensor: Tensor) -> Tensor:
        seen.extend([tuple(tensor.shape)] if tensor.numel() else [])  # older releases of PyTorch keep an empty one too
        return tensor.clone()

    model = recomputing("none", lora=lora)
    recompute_layers(unwrapped(model), "full", partial(saved_tensors_hooks, partial(moved, gone), partial(moved, back)))
    run = partial(last_states, input_ids=IDS)
    offloaded, plain = gradients(model, run), gradients(recomputing("none", lora=lora), run)
    assert gone == back == [(3, 20, 32)] * 2 and all(map(torch.equal, plain, offloaded))
