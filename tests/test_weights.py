"""Copies of the weights that rollouts multiply by: they say what the trainer's modules say, and go when these end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small import adapted_model, contents, make_engine, require_bits, small_model, some_requests
from test_same_rollouts import same_in_short
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_cli.engine import layers
from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.determinism import without_company
from grpo_cli.engine.layers import NATIVE, Each, Product, Weights, can_pack


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small models are."""
    if not can_pack():
        pytest.skip("this PyTorch has no packed products")
    monkeypatch.setattr(layers, "PACKED_FROM", 0)


class Casts(TorchDispatchMode):
    """Counts the weights that are cast: of one shape with a parameter, from float32 to bfloat16."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.addresses, self.count = {weight.data_ptr() for weight in model.parameters()}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.addresses:
            self.count += out.dtype == torch.bfloat16
        return out


@pytest.mark.parametrize("adapted", [False, True])
def test_rollouts_cast_each_weight_once_and_say_what_autocast_says(
    adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counts = adapted_model() if adapted else small_model(), list[int]()
    for tokens in (4, 12):
        engine = make_engine(model, eos_token_ids=(10**6,))
        with torch.autocast("cpu", torch.bfloat16), Casts(model) as casts:
            rollouts = list(engine.generate(some_requests(prompts=1, n=2, tokens=tokens)))
        counts.append(casts.count)
    assert counts[0] == counts[1] > 0, "however many steps there are"
    once = contents(rollouts)
    monkeypatch.setattr(Weights, "of", lambda self, layer: layer)
    monkeypatch.setattr(Weights, "together", lambda self, *layers: Each(layers))
    with torch.autocast("cpu", torch.bfloat16):
        assert contents(engine.generate(some_requests(prompts=1, n=2, tokens=12))) == once


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_packed_copies_with_adapters_say_what_the_modules_say(precision: str) -> None:
    """In float32 adapters are merged; beside bfloat16 they are float32 in the policy, and the same to rounding."""
    model, requests = adapted_model(), some_requests(prompts=2, n=3)
    for name, weight in model.named_parameters() if precision == "bfloat16" else ():
        weight.data = weight.data if "lora_" in name else weight.data.bfloat16()
    engines = [make_engine(model, packed_weights=packed) for packed in (True, False)]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        ours, theirs = (contents(engine.generate(requests)) for engine in engines)
    assert [engine.facts()["packed_weights"] for engine in engines] == [True, False]
    same = [name for name in ours if ours[name][0] == theirs[name][0]]
    assert len(same) == len(ours) or (precision != "float32" and len(same) > 2)
    for name in same:
        assert ours[name][1] == pytest.approx(theirs[name][1], abs=1e-4 if precision == "float32" else 0.15)


@pytest.mark.usefixtures("packed")
def test_weights_are_not_packed_where_only_without_bits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = Weights._multiply

    def uneven(self: Weights, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        product = multiply(self, weight, bias)
        return (lambda x: product(x) * (1.0 + 1e-6 * (x.shape[0] % 7))) if self.packed else product

    require_bits(small_model())
    monkeypatch.setattr(Weights, "_multiply", uneven)
    other = small_model(vocab_size=26)  # what was found is remembered by shape
    decoder, holds = without_company(replace(Decoder.of(other), may_pack=True, functions=NATIVE))
    assert holds and not decoder.packs
    same_in_short(other, some_requests(prompts=2, n=8, tokens=14))


@pytest.mark.usefixtures("packed")
def test_adapters_on_a_quantised_base_are_kept_apart() -> None:
    model = adapted_model()
    plain = contents(make_engine(model, packed_weights=False).generate(some_requests()))
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.base_layer.__class__ = type("Quantised", (nn.Linear,), {})
    found = contents(make_engine(model).generate(some_requests()))
    assert {name: words[0] for name, words in found.items()} == {name: words[0] for name, words in plain.items()}
