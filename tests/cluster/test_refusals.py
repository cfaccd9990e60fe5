"""What is refused before Ray is started or joined, which requests are dealt together, and what a worker is sent."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import made
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import engine_of, small_model, some_requests

from grpo_cli.config.choices import shipped
from grpo_cli.config.instantiate import Factories
from grpo_cli.engine.ray_engine import RayEngine, connect, portions, refuse_public
from grpo_cli.engine.ray_worker import hollow, place
from grpo_cli.engine.sequence import Sequence
from grpo_cli.support.errors import UserError


@pytest.mark.parametrize(
    ("engine", "said"), [({"inner": "vllm"}, "sparsity=rkv"), ({"inner": "ray"}, "engine.inner=ray")]
)
def test_what_the_inner_engine_refuses(engine, said):
    parts = dict(made.settings().parts) | {"engine": made.part("engine", "ray", **engine)}
    parts["sparsity"] = made.part("sparsity", "rkv")
    with pytest.raises(UserError, match=said):
        Factories.of(parts).engine_parts({"seed": 0}, early=True)


@pytest.mark.parametrize(("inner", "options"), [("torch", {}), ("vllm", {"memory": 0.8})])
def test_the_inner_engine_is_that_of_its_file_with_the_options_on_top(inner, options):
    found = Factories.of({"engine": made.part("engine", "ray", inner=inner, options=options)}).engines()[-1]
    assert found.part == shipped("engine", inner) | options


def test_an_address_of_rays_client_is_refused():
    with pytest.raises(UserError, match="engine.address=ray://127.0.0.1:10001: use auto, or host:port"):
        connect("ray://127.0.0.1:10001", 1, {"CPU": 1})


@pytest.mark.parametrize("host", ["8.8.8.8", "2001:4860:4860::8888"])
def test_a_public_cluster_without_a_token(host, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    refuse_public(["127.0.0.1", "10.1.2.3", "192.168.0.7", "fd00::1"])
    with pytest.raises(UserError, match=f"{host} is public"):
        refuse_public(["10.1.2.3", host])
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    refuse_public([host])


def test_what_a_ray_engine_refuses_of_its_model_and_settings(monkeypatch):
    model, build = small_model(), print
    with pytest.raises(UserError, match=r"engine.gpus=1.5 of a worker"):
        engine_of("ray", model, build=build, gpus=1.5)
    with pytest.raises(UserError, match="collector=equal"):
        next(RayEngine.generate(object.__new__(RayEngine), [], lambda rollout: True))
    model.lm_head.weight = type("Int8Params", (type(model.lm_head.weight),), {})(model.lm_head.weight.data)
    with pytest.raises(UserError, match=r"quantised .*model.quantize=none"):
        engine_of("ray", model, build=build)


def met(**other: Any) -> list[str]:
    """The warnings about two workers at a place that differs so from the trainer's."""
    engine, said = object.__new__(RayEngine), list[str]()
    engine._parts, engine._warned, engine._device = SimpleNamespace(warn=said.append), set(), torch.device("cpu")
    engine._place = place()
    for _ in range(2):
        engine._check_place(engine._place | other)
    return said


def test_workers_that_run_something_else_are_refused_and_those_that_round_otherwise_are_said_once():
    with pytest.raises(UserError, match="install the same everywhere"):
        met(software="Python 3, torch 9")
    assert met() == [] and len(met(threads=99)) == 1


def test_a_hollow_model_has_no_numbers_and_ties_stay_ties():
    model = small_model(hidden_size=64, tie_word_embeddings=True)
    copy = hollow(model)
    assert len(pickle.dumps(copy)) < sum(p.numel() for p in model.parameters())
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert not any(p.requires_grad for p in copy.parameters()) and not copy.training
    assert [name for name, _ in copy.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert all(p.requires_grad for p in model.parameters())


# Which requests are dealt together, and in which order


def dealt(lengths: list[float], workers: int, at_once: bool) -> list[list[int]]:
    one, *_ = some_requests(1, 1)
    sequences = [Sequence(index, one, predicted=length) for index, length in enumerate(lengths)]
    return [[sequence.index for sequence in portion] for portion in portions(sequences, workers, at_once)]


def test_portions_by_hand():
    # Shares of 100, of which nine tenths go first; then 10 each, to who has ended.
    assert [len(portion) for portion in dealt([1.0] * 200, 2, False)] == [90, 90, 10, 10]
    # One batch each where a portion is one batch, and everything for a single worker.
    assert dealt([7.0] * 6, 2, True) == [[0, 1, 2], [3, 4, 5]]
    assert dealt([7.0] * 3, 1, False) == [[0, 1, 2]]
    # The longest go first, and portions are equally long.
    assert dealt([10.0, 40.0, 20.0, 30.0], 2, True) == [[1], [3, 2, 0]]


@given(lengths=st.lists(st.floats(0, 99), min_size=1, max_size=60), workers=st.integers(1, 6), at_once=st.booleans())
def test_every_request_is_dealt_once(lengths, workers, at_once):
    found = dealt(lengths, workers, at_once)
    assert all(found) and sorted(index for portion in found for index in portion) == list(range(len(lengths)))
