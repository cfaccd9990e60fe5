"""What is refused before Ray is started or joined, which requests are dealt together, and what a worker is sent."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

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


def test_the_inner_engine_is_that_of_its_file_with_the_options_on_top_and_refuses_what_it_does_elsewhere():
    found = Factories.of({"engine": made.part("engine", "ray", inner="vllm", options={"memory": 0.8})}).engines()[-1]
    assert found.part == shipped("engine", "vllm") | {"memory": 0.8}
    for inner, said in (("vllm", "sparsity=rkv"), ("ray", "engine.inner=ray")):
        parts = dict(made.settings().parts) | {"engine": made.part("engine", "ray", inner=inner)}
        with pytest.raises(UserError, match=said):
            Factories.of(parts | {"sparsity": made.part("sparsity", "rkv")}).engine_parts({"seed": 0}, early=True)


def test_a_public_cluster_without_a_token_and_an_address_of_rays_client_are_refused(monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    refuse_public(["127.0.0.1", "10.1.2.3", "192.168.0.7", "fd00::1"])
    for host in ("8.8.8.8", "2001:4860:4860::8888"):
        with pytest.raises(UserError, match=f"{host} is public"):
            refuse_public(["10.1.2.3", host])
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    refuse_public(["8.8.8.8"])
    with pytest.raises(UserError, match="engine.address=ray://127.0.0.1:10001: use auto, or host:port"):
        connect("ray://127.0.0.1:10001", 1, {"CPU": 1})


def test_what_a_ray_engine_refuses_of_its_model_settings_and_workers():
    model, build = small_model(), print
    with pytest.raises(UserError, match=r"engine.gpus=1.5 of a worker"):
        engine_of("ray", model, build=build, gpus=1.5)
    engine, said, here = object.__new__(RayEngine), list[str](), place()
    with pytest.raises(UserError, match="collector=equal"):
        next(engine.generate([], lambda rollout: True))
    engine._parts, engine._warned, engine._device = SimpleNamespace(warn=said.append), set(), torch.device("cpu")
    engine._place = here
    with pytest.raises(UserError, match="install the same everywhere"):
        engine._check_place(here | {"software": "Python 3, torch 9"})
    for there in (here, here | {"threads": 99}, here | {"threads": 99}):
        engine._check_place(there)
    assert len(said) == 1, "those that round otherwise are named once"
    model.lm_head.weight = type("Int8Params", (type(model.lm_head.weight),), {})(model.lm_head.weight.data)
    with pytest.raises(UserError, match=r"quantised .*model.quantize=none"):
        engine_of("ray", model, build=build)


def test_a_hollow_model_has_no_numbers_and_ties_stay_ties():
    model = small_model(hidden_size=64, tie_word_embeddings=True)
    copy = hollow(model)
    assert len(pickle.dumps(copy)) < sum(p.numel() for p in model.parameters())
    assert copy.lm_head.weight is copy.model.embed_tokens.weight and not copy.training
    assert [name for name, _ in copy.named_buffers()] == [name for name, _ in model.named_buffers()]


def dealt(lengths: list[float], workers: int, at_once: bool) -> list[list[int]]:
    one, *_ = some_requests(1, 1)
    sequences = [Sequence(index, one, predicted=length) for index, length in enumerate(lengths)]
    return [[sequence.index for sequence in portion] for portion in portions(sequences, workers, at_once)]


def test_portions_by_hand():
    # Shares of 100, of which nine tenths go first; then 10 each, to who has ended.
    assert [len(portion) for portion in dealt([1.0] * 200, 2, False)] == [90, 90, 10, 10]
    # One batch each where a portion is one batch, and everything for a single worker.
    assert dealt([7.0] * 3, 1, False) == [[0, 1, 2]]
    # The longest go first, and portions are equally long.
    assert dealt([10.0, 40.0, 20.0, 30.0], 2, True) == [[1], [3, 2, 0]]


@given(lengths=st.lists(st.floats(0, 99), min_size=1, max_size=60), workers=st.integers(1, 6), at_once=st.booleans())
def test_every_request_is_dealt_once(lengths: list[float], workers: int, at_once: bool):
    found = dealt(lengths, workers, at_once)
    assert all(found) and sorted(index for portion in found for index in portion) == list(range(len(lengths)))
