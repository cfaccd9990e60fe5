"""Decode steps of fixed shape: the same tokens as the reference, few shapes, and on a GPU the same through a graph."""

from __future__ import annotations

from typing import Any

import pytest
from captured import Again
from made import full, infinite, micro, prefix_head
from small import contents, make_engine, small_model, some_requests

from grpo_cli.engine.scheduling import Lpt
from grpo_cli.support.errors import UserError


def test_few_shapes_occur_and_each_is_captured_once() -> None:
    """16 samples of one prompt in 8 slots. And two samples of one token, which comes without a step."""
    for sampler, n, tokens, captured in ((infinite(slots=8), 16, 64, (1, 2, 3)), (full(), 2, 1, (0,))):
        engine, capture = make_engine(small_model(), sampler=sampler), Again()
        engine._capture = lambda capture=capture: capture
        list(engine.generate(some_requests(prompts=1, n=n, tokens=tokens)))
        assert capture.captured in captured


def test_a_graph_is_refused_without_a_gpu_and_for_a_model_that_waits_for_the_host() -> None:
    for name, value in (("", 0), ("is_loaded_in_8bit", True), ("rope_type", "dynamic")):
        model = small_model()
        setattr(model if name.startswith("is_") else model.model.rotary_emb, name, value) if name else None
        with pytest.raises(UserError, match="engine.cuda_graph=true"):
            make_engine(model, cuda_graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("sampler", [full(), micro(slots=5), infinite(slots=3)])
@pytest.mark.parametrize("pauses", [False, True])
def test_a_cuda_graph_repeats_the_eager_step(sampler: Any, pauses: bool) -> None:
    """Twice, as a pool outlives the graphs that are thrown away: PyTorch's end with their last graph."""
    model, requests = small_model().to("cuda"), some_requests(prompts=4, n=4, tokens=40)
    found = []
    for graph in (False, True):
        prefix = dict(scheduler=Lpt(), predictor=prefix_head(prefix_tokens=8, min_rollouts=2)) if pauses else {}
        engine = make_engine(model, sampler=sampler, cuda_graph=graph, **prefix)
        found += [contents(engine.generate(requests)) for _ in range(2)]
    plain = found[0]
    for other in found[2:]:
        # Rounding differs with the shapes, and one token drawn otherwise changes all that follow.
        assert sum(plain[key][0] == other[key][0] for key in plain) >= 0.9 * len(plain)
