"""Copies of the weights that rollouts multiply by: they say what the trainer's modules say, and go when these end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jaxtyping
import pytest
import torch
from made import infinite
from small import adapted_model, contents, make_engine, small_model, some_requests
from torch.utils.flop_counter import FlopCounterMode

from grpo_cli.engine import products
from grpo_cli.engine.products import has_packed
from grpo_cli.model import compiling


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small models are."""
    if not has_packed(torch.float32):
        pytest.skip("this PyTorch has no packed products")
    monkeypatch.setattr(products, "PACKED_FROM", 0)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_packed_copies_with_adapters_say_what_the_modules_say(precision):
    """In float32 adapters are merged; beside bfloat16 they are float32 in the policy, and the same to rounding."""
    model, requests = adapted_model(), some_requests(prompts=2, n=3)
    for name, weight in model.named_parameters() if precision == "bfloat16" else ():
        weight.data = weight.data if "lora_" in name else weight.data.bfloat16()
    engines = [make_engine(model, packed_weights=packed) for packed in (True, False)]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        ours, theirs = (contents(engine.generate(requests)) for engine in engines)
    packs = [has_packed(torch.float32 if precision == "float32" else torch.bfloat16), False]
    assert [engine.facts()["packed_weights"] for engine in engines] == packs
    same = [name for name in ours if ours[name][0] == theirs[name][0]]
    assert len(same) == len(ours) or (precision != "float32" and len(same) > 2)
    for name in same:
        assert ours[name][1] == pytest.approx(theirs[name][1], abs=1e-4 if precision == "float32" else 0.15)


class Counting:
    """A compiler that returns its argument, counts calls, and fails at one of them if a test sets it."""

    def __init__(self) -> None:
        self.compiled, self.fails_at = 0, -1

    def __call__(self, graph: torch.fx.GraphModule, operands: list[Any]) -> Callable[..., Any]:
        self.compiled += 1
        if self.compiled > self.fails_at >= 0:
            raise OSError("there is no compiler")
        return graph.forward


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Annotations are not checked meanwhile, which would be compiled too."""
    torch._dynamo.reset()
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(compiling, "BACKEND", counting := Counting())
    return counting


def tokens(rollouts: Any) -> dict[Any, Any]:
    return {name: words[0] for name, words in contents(rollouts).items()}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_compilation_serves_all_layers_and_all_numbers_of_rows(family, compiler):
    """18 rollouts in 12 slots, so 12 rows and fewer, all laid out as 16; and none where every operation is watched, as
    a profile does, which PyTorch's compiler refuses."""
    model, requests = small_model(family, num_hidden_layers=5), some_requests(prompts=3, n=6, tokens=30)
    plain = tokens(make_engine(model, sampler=infinite(slots=12)).generate(requests))
    for watched, compiled in ((FlopCounterMode(display=False), 0), (nullcontext(), 2)):
        with watched:
            engine = make_engine(model, sampler=infinite(slots=12), compile=True)
            assert tokens(engine.generate(requests)) == plain and compiler.compiled == compiled


def test_where_compiling_fails_steps_are_as_they_were_and_that_is_said_once(compiler):
    model, requests, said = small_model(), some_requests(prompts=2, n=3, tokens=12), list[str]()
    plain = tokens(make_engine(model).generate(requests))
    compiler.fails_at = 1
    engine = make_engine(model, compile=True, warn=said.append)
    for _ in range(2):
        assert tokens(engine.generate(requests)) == plain
    assert len(said) == 1 and "engine.compile=false" in said[0]
