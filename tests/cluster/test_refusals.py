"""What is refused before Ray is started or joined, which requests are dealt together."""

from __future__ import annotations

import pickle

import made
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import engine_of, small_model

from grpo_cli.config.choices import shipped
from grpo_cli.config.instantiate import Factories
from grpo_cli.engine.ray_engine import RayEngine, portions, without_weights
from grpo_cli.support.errors import UserError


def test_the_inner_engine_is_that_of_its_file_with_the_options_on_top_and_refuses_what_it_does_elsewhere():
    found = Factories.of({"engine": made.part("engine", "ray", inner="vllm", options={"memory": 0.8})}).sampling_engine
    assert found.part == shipped("engine", "vllm") | {"memory": 0.8}
    for inner, said in (("vllm", "sparsity=rkv"), ("ray", "engine.inner=ray")):
        parts = dict(made.settings().parts) | {"engine": made.part("engine", "ray", inner=inner)}
        with pytest.raises(UserError, match=said):
            Factories.of(parts | {"sparsity": made.part("sparsity", "rkv")}).engine_parts(0)


def test_what_a_ray_engine_refuses_of_its_model_and_settings():
    model, build = small_model(), print
    with pytest.raises(UserError, match="collector=equal"):
        next(RayEngine.generate(object.__new__(RayEngine), [], lambda rollout: True))
    model.lm_head.weight = type("Int8Params", (type(model.lm_head.weight),), {})(model.lm_head.weight.data)
    with pytest.raises(UserError, match=r"quantised .*model.quantize=none"):
        engine_of("ray", model, build=build)


def test_a_model_without_weights_has_no_numbers_and_ties_stay_ties():
    model = small_model(hidden_size=64, tie_word_embeddings=True)
    copy = without_weights(model)
    assert len(pickle.dumps(copy)) < sum(p.numel() for p in model.parameters())
    assert copy.lm_head.weight is copy.model.embed_tokens.weight and not copy.training
    assert [name for name, _ in copy.named_buffers()] == [name for name, _ in model.named_buffers()]


def test_portions_by_hand():
    # Of 200 requests nine tenths go first; the rest is for those who have finished.
    assert [len(portion) for portion in portions(200, 2, False)] == [90, 90, 10, 10]
    # One batch each where a portion is one batch, and everything for a single worker.
    assert portions(6, 2, True) == [[0, 1, 2], [3, 4, 5]]
    assert portions(3, 1, False) == [[0, 1, 2]]
    assert portions(1, 4, False) == [[0]]


@given(requests=st.integers(1, 60), workers=st.integers(1, 6), at_once=st.booleans())
def test_every_request_is_dealt_once(requests: int, workers: int, at_once: bool):
    found = portions(requests, workers, at_once)
    assert all(found) and [index for portion in found for index in portion] == list(range(requests))
    assert not at_once or len(found) <= workers
