"""Steps through torch.compile: once for all layers, in few numbers of rows, and as they were where it fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jaxtyping
import pytest
import torch
from made import infinite
from small import contents, make_engine, small_model, some_requests
from torch.utils.flop_counter import FlopCounterMode

from grpo_cli.model import compiling


class Counting:
    """A compiler that gives back what it was given, counts, and fails at one of them if it is told to."""

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
def test_one_compilation_serves_all_layers_and_all_numbers_of_rows(family: str, compiler: Counting) -> None:
    """18 rollouts in 12 slots, so 12 rows and fewer, all laid out as 16; and none where every operation is watched, as
    a profile does, which PyTorch's compiler refuses."""
    model, requests = small_model(family, num_hidden_layers=5), some_requests(prompts=3, n=6, tokens=30)
    plain = tokens(make_engine(model, sampler=infinite(slots=12)).generate(requests))
    for watched, compiled in ((FlopCounterMode(display=False), 0), (nullcontext(), 2)):
        with watched:
            engine = make_engine(model, sampler=infinite(slots=12), compile=True)
            assert tokens(engine.generate(requests)) == plain and compiler.compiled == compiled


def test_where_compiling_fails_steps_are_as_they_were_and_that_is_said_once(compiler: Counting) -> None:
    model, requests, said = small_model(), some_requests(prompts=2, n=3, tokens=12), list[str]()
    plain = tokens(make_engine(model).generate(requests))
    compiler.fails_at = 1
    engine = make_engine(model, compile=True, warn=said.append)
    for _ in range(2):
        assert tokens(engine.generate(requests)) == plain
    assert len(said) == 1 and "engine.compile=false" in said[0]
