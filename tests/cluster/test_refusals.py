"""What is refused before Ray is started or joined, and in which words."""

from __future__ import annotations

import pickle

import made
import pytest
from small import small_model

from grpo_cli.config.choices import shipped
from grpo_cli.config.instantiate import engine_parts, engines, factories, factory
from grpo_cli.engine.length_predictor import NoPredictor
from grpo_cli.engine.ray_engine import RayEngine, connect
from grpo_cli.engine.ray_worker import hollow
from grpo_cli.engine.scheduling import Fifo
from grpo_cli.support.errors import UserError


def test_what_the_inner_engine_refuses():
    parts = dict(made.settings().parts) | {"engine": made.part("engine", "ray", inner="vllm")}
    parts["sparsity"] = made.part("sparsity", "rkv")
    with pytest.raises(UserError, match="sparsity=rkv is not supported by engine=vllm"):
        engine_parts(factories(parts), {"seed": 0}, early=True)


@pytest.mark.parametrize(("inner", "options"), [("torch", {}), ("vllm", {"memory": 0.8})])
def test_the_inner_engine_is_that_of_its_file_with_the_options_on_top(inner, options):
    found = engines(factory("engine", made.part("engine", "ray", inner=inner, options=options)))[-1]
    assert found.part == shipped("engine", inner) | options


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "head", "head:x"])
def test_addresses_that_cannot_be_meant(address):
    with pytest.raises(UserError, match=f"^engine.address={address}: use auto, or host:port"):
        connect(address, 1, {"CPU": 1})


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "no.such.host.invalid:6379"])
def test_addresses_at_which_nothing_answers(address):
    with pytest.raises(UserError, match=f"^engine.address={address} does not answer .*: run ray start --head there$"):
        connect(address, 1, {"CPU": 1})


def test_quantised_weights():
    model = small_model()
    model.lm_head.weight = type("Int8Params", (type(model.lm_head.weight),), {})(model.lm_head.weight.data)
    with pytest.raises(UserError, match=r"quantised .*model.quantize=none"):
        RayEngine(
            model,
            made.full(),
            Fifo(),
            NoPredictor(),
            print,
            **{name: x for name, x in made.part("engine", "ray").items() if name != "_target_"},
        )


def test_a_hollow_model_has_no_numbers_and_ties_stay_ties():
    model = small_model(hidden_size=64, tie_word_embeddings=True)
    copy = hollow(model)
    assert len(pickle.dumps(copy)) < sum(p.numel() for p in model.parameters())
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert not any(p.requires_grad for p in copy.parameters()) and not copy.training
    assert [name for name, _ in copy.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert all(p.requires_grad for p in model.parameters())
