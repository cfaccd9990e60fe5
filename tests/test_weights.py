"""Weights of the weights that rollouts multiply by: they say what the trainer's modules say, and go when these end."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from small import adapted_model, contents, make_engine, require_bits, small_model, some_requests
from test_same_rollouts import same_in_short
from torch import nn

from grpo_cli.engine import layers
from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.determinism import invariance_of
from grpo_cli.engine.layers import Product, Weights, can_pack, norm_of
from grpo_cli.memory.allocations import ACTIVATIONS, Allocations


@pytest.fixture(autouse=True)
def small_ones_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_pack():
        pytest.skip("this PyTorch has no packed products")
    monkeypatch.setattr(layers, "PACKED_FROM", 0)


def agree(model: Any, tolerance: float) -> None:
    """Rollouts by packed copies and by the modules have the same tokens, and log-probabilities within `tolerance`."""
    requests = some_requests(prompts=2, n=3)
    engines = [make_engine(model, packed_weights=packed) for packed in (True, False)]
    ours, theirs = (contents(engine.generate(requests)) for engine in engines)
    assert [engine.facts()["packed_weights"] for engine in engines] == [True, False]
    same = [name for name in ours if ours[name][0] == theirs[name][0]]
    assert len(same) == len(ours) or (tolerance > 1e-3 and len(same) > 2)
    for name in same:
        assert ours[name][1] == pytest.approx(theirs[name][1], abs=tolerance)


def test_adapters_merged_in_float32_say_what_they_say_apart() -> None:
    model = adapted_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(model, 1e-4)
    engine = make_engine(model)
    before = contents(engine.generate(some_requests()))
    with model.disable_adapter():
        assert contents(engine.generate(some_requests())) != before, "adapters count"


@pytest.mark.parametrize("autocast", [False, True])
def test_adapters_beside_bfloat16_say_what_the_modules_say(autocast: bool) -> None:
    """With bfloat16 weights the adapters are float32 in the policy, so that they say the same to rounding."""
    model = adapted_model()
    if not autocast:
        for name, weight in model.named_parameters():
            weight.data = weight.data if "lora_" in name else weight.data.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        agree(model, 0.15)


def test_weights_are_not_packed_where_only_without_bits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = Weights._multiply

    def uneven(self: Weights, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        product = multiply(self, weight, bias)
        return lambda x: product(x) * (1.0 + 1e-6 * (x.shape[0] % 7))

    model = small_model(vocab_size=25)  # what was found is remembered by shape
    require_bits(small_model())
    assert invariance_of(Decoder.of(model, may_pack=True)).packed
    monkeypatch.setattr(Weights, "_multiply", uneven)
    other = small_model(vocab_size=26)
    found = invariance_of(Decoder.of(other, may_pack=True))
    assert found.holds and not found.packed
    same_in_short(other, some_requests(prompts=2, n=8, tokens=14))


@pytest.mark.parametrize("packed", [False, True])
def test_copies_are_predicted_and_go_with_their_generation(packed: bool) -> None:
    model, requests = small_model("llama"), some_requests(prompts=1, n=2)
    engine = make_engine(model, packed_weights=packed)
    list(engine.generate(requests))  # bits are tried
    with Allocations(model) as allocations:
        list(engine.generate(requests))
        seen = allocations.take_peak()[ACTIVATIONS]
        gc.collect()
        left = (allocations.take_peak(), allocations.take_peak())[1].get(ACTIVATIONS, 0)
    linear = sum(4 * layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    assert left < linear < (seen if packed else 4 * linear)


class Quantised(nn.Linear):
    """A layer that is not to be copied."""


def test_adapters_on_a_quantised_base_are_kept_apart_and_that_is_said() -> None:
    model, said = adapted_model(), list[str]()
    plain = contents(make_engine(model, packed_weights=False).generate(some_requests()))
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.base_layer.__class__ = Quantised
    engine = make_engine(model, warn=said.append)
    assert len(said) == 1 and "adapters are not merged for rollouts" in said[0]
    found = contents(engine.generate(some_requests()))
    assert {name: words[0] for name, words in found.items()} == {name: words[0] for name, words in plain.items()}


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_a_norm_rounds_where_its_module_does(weights: torch.dtype, inputs: torch.dtype) -> None:
    """Under autocast Qwen3's norms of queries and keys see bfloat16 by float32 weights."""
    module = small_model("qwen3").model.layers[0].self_attn.q_norm.to(weights)
    x = torch.randn(40, 4, 8, generator=torch.Generator().manual_seed(0)).to(inputs)
    ours, theirs = norm_of(module)(x), module(x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=0, rtol=5e-7 if ours.dtype == torch.float32 else 0)
