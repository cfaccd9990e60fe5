"""Decode steps of fixed shape: the same tokens as the reference, few shapes, and on a GPU the same through a graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from captured import Again
from made import full, infinite, micro, prefix_head
from small import contents, make_engine, small_model, some_requests

from grpo_cli.engine.cuda_graph import CudaGraphs
from grpo_cli.engine.scheduling import Lpt
from grpo_cli.support.errors import UserError


def captured(sampler: Any, requests: Any) -> int:
    engine, capture = make_engine(small_model(), sampler=sampler), Again()
    engine._capture = lambda: capture
    list(engine.generate(requests))
    return capture.captured


def test_few_shapes_occur_and_each_is_captured_once() -> None:
    # 16 samples of one prompt in 8 slots, at most 64 keys: tables of 1, 2 and 4 blocks.
    assert 1 <= captured(infinite(slots=8), some_requests(prompts=1, n=16, tokens=64)) <= 3
    # The first token of a rollout comes without a step.
    assert captured(full(), some_requests(prompts=1, n=2, tokens=1)) == 0


@pytest.mark.parametrize("words", [{}, {"is_loaded_in_8bit": True}, {"rope_type": "dynamic"}])
def test_a_graph_is_refused_without_a_gpu_and_for_a_model_that_waits_for_the_host(words: Any) -> None:
    model = small_model()
    for name, value in words.items():
        setattr(model if name.startswith("is_") else model.model.rotary_emb, name, value)
    with pytest.raises(UserError, match="engine.cuda_graph=true"):
        make_engine(model, cuda_graph=True)


def test_a_pool_outlives_the_graphs_that_are_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's pools end with their last graph, and a capture into one that has ended fails."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    begun: list[Any] = []

    class Graph:
        def replay(self) -> None: ...

    @contextmanager
    def graph(made: Graph, pool: object, **_: Any) -> Iterator[None]:
        assert not begun or alive, "the pool has ended"
        begun.append(pool)
        alive.add(made)
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "CUDAGraph": Graph, "graph": graph, "graph_pool_handle": object, "Stream": lambda: stream,
        "current_stream": lambda: stream, "stream": lambda _: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    capture = CudaGraphs()
    for number in range(3):
        assert capture(lambda number=number: (torch.tensor(number),))[1]()[0] == number  # and the replay is dropped
        gc.collect()
    assert len(begun) == 3 and len(alive) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("sampler", [full(), micro(slots=5), infinite(slots=3)])
@pytest.mark.parametrize("pauses", [False, True])
def test_a_cuda_graph_repeats_the_eager_step(sampler: Any, pauses: bool) -> None:
    model, requests = small_model().to("cuda"), some_requests(prompts=4, n=4, tokens=40)
    found = []
    for graph in (False, True):
        prefix = dict(scheduler=Lpt(), predictor=prefix_head(prefix_tokens=8, min_rollouts=2)) if pauses else {}
        engine = make_engine(model, sampler=sampler, cuda_graph=graph, **prefix)
        found.append(contents(engine.generate(requests)))
    assert found[0].keys() == found[1].keys()
    same = [found[0][key][0] == found[1][key][0] for key in found[0]]
    # Rounding differs with the shapes, and one token drawn otherwise changes all that follow.
    assert sum(same) >= 0.9 * len(same)
