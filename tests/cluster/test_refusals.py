"""What is refused before Ray is started or joined, and in which words."""

from __future__ import annotations

import os
import pickle
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import made
import pytest
import torch
from small import small_model

from grpo_cli.config.choices import shipped
from grpo_cli.config.instantiate import engine_parts, inner_engine
from grpo_cli.engine.ray.engine import RayEngine
from grpo_cli.engine.ray.session import (
    check_address,
    check_public,
    check_room,
    environment_of,
    reason_of,
)
from grpo_cli.engine.ray.weights import hollow
from grpo_cli.engine.ray.worker import place
from grpo_cli.support.errors import UserError


def refusal(**changed: Any) -> str:
    """Of the engine's settings, with all other parts as the default run has them."""
    parts = dict(made.settings().parts) | {"engine": made.part("engine", "ray", **changed)}
    with pytest.raises(UserError) as refused:
        engine_parts(parts, {"seed": 0}, early=True)
    return str(refused.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"workers": 0}, "engine.workers=0"),
        ({"threads": 0}, "engine.threads=0"),
        ({"gpus": 1.5}, "engine.gpus=1.5 .* a whole number"),
        ({"gpus": -1.0}, "engine.gpus=-1"),
        ({"timeout": 0.0}, "engine.timeout=0"),
        ({"kv_budget_of": "me"}, "engine.kv_budget_of=me must be one of worker, run"),
        ({"inner": "ray"}, "engine.inner=ray must be one of generate, torch, vllm"),
        ({"options": {"cuda_grap": True}}, "engine.cuda_grap: .* did you mean cuda_graph"),
    ],
)
def test_settings_that_cannot_be_meant(changed, words):
    assert re.search(words, refusal(**changed)), refusal(**changed)


def test_a_budget_without_an_owner():
    parts = dict(made.settings().parts) | {"engine": made.part("engine", "ray", workers=4)}
    parts["sampler"] = made.part("sampler", "infinite", kv_budget="1GiB")
    with pytest.raises(UserError, match="sampler.kv_budget=1GiB .*engine.kv_budget_of=worker"):
        engine_parts(parts, {"seed": 0}, early=True)
    parts["engine"] |= {"kv_budget_of": "worker"}
    engine_parts(parts, {"seed": 0}, early=True)


def test_what_the_inner_engine_refuses():
    parts = dict(made.settings().parts) | {"engine": made.part("engine", "ray", inner="vllm")}
    parts["sparsity"] = made.part("sparsity", "rkv")
    with pytest.raises(UserError, match="sparsity=rkv cannot be had with engine=vllm"):
        engine_parts(parts, {"seed": 0}, early=True)


def test_the_inner_engine_is_that_of_its_file_with_the_options_on_top():
    assert inner_engine(made.part("engine", "ray")) == shipped("engine", "torch")
    changed = inner_engine(made.part("engine", "ray", inner="vllm", options={"memory": 0.8}))
    assert changed == shipped("engine", "vllm") | {"memory": 0.8}


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_addresses(listening):
    check_address("auto")
    check_address(f"127.0.0.1:{listening}")
    for address, words in {
        "ray://127.0.0.1:10001": "engine.address=ray://127.0.0.1:10001 must be auto",
        "head": "engine.address=head must be auto",
        "head:x": "engine.address=head:x must be auto",
        "127.0.0.1:1": "nobody answers at engine.address=127.0.0.1:1",
        "127.0.0.1:99999": "nobody answers at engine.address=127.0.0.1:99999",
        "no.such.host.invalid:6379": "nobody answers at engine.address=no.such.host.invalid:6379",
    }.items():
        with pytest.raises(UserError, match=words):
            check_address(address)


@pytest.mark.parametrize("host", ["8.8.8.8", "2001:4860:4860::8888"])
def test_a_public_cluster_without_a_token(host):
    with pytest.raises(UserError, match=f"address {host} is public, and Ray runs the code that anybody sends it"):
        check_public(host, {})
    check_public(host, {"RAY_AUTH_MODE": "token"})
    for private in ("127.0.0.1", "10.1.2.3", "192.168.0.7", "fd00::1"):
        check_public(private, {})


def nodes(*resources: dict[str, float]) -> list[dict[str, Any]]:
    return [{"Alive": True, "Resources": one} for one in resources]


def test_more_workers_than_have_room():
    two = nodes({"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0})
    free = {"CPU": 12.0, "GPU": 2.0}
    check_room(2, 4, 1.0, two, free)
    for workers, cpus, gpus, nodes_there, free_there, words in [
        (3, 4, 1.0, two, free, "engine.workers=3 .*engine.threads.*engine.gpus.* room for 2;.*engine.address"),
        (1, 8, 0.0, two, free, "room for 0"),  # eight CPUs there are, but on no node
        (4, 1, 0.0, two, {"CPU": 3.0}, "room for 3"),
        (1, 1, 0.0, [{"Alive": False, "Resources": {"CPU": 64.0}}], free, "room for 0"),
        (3, 1, 0.5, nodes({"CPU": 8.0, "GPU": 1.0}), free, "room for 2"),
    ]:
        with pytest.raises(UserError, match=words):
            check_room(workers, cpus, gpus, nodes_there, free_there)


def test_quantised_weights():
    model = small_model()
    model.lm_head.weight = type("Int8Params", (type(model.lm_head.weight),), {})(model.lm_head.weight.data)
    with pytest.raises(
        UserError, match=r"lm_head.weight is quantised \(model.quantize\), and engine=ray sends weights"
    ):
        hollow(model)


def test_a_hollow_model_has_no_numbers_and_ties_stay_ties():
    model = small_model(hidden_size=64, tie_word_embeddings=True)
    copy = hollow(model)
    assert len(pickle.dumps(copy)) < sum(p.numel() for p in model.parameters())
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert not any(p.requires_grad for p in copy.parameters()) and not copy.training
    assert [name for name, _ in copy.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert all(p.requires_grad for p in model.parameters())


def checked(**other: Any) -> list[str]:
    """What is said of a worker at a place that differs so from the trainer's."""
    engine, said = object.__new__(RayEngine), list[str]()
    engine._place = place("trainer", torch.device("cpu"))
    engine._warn, engine._said_bits = said.append, False
    for _ in range(2):
        engine._check_place(replace(engine._place, **other))
    return said


def test_workers_that_run_something_else_are_refused():
    with pytest.raises(UserError, match=r"has torch 9\.9, and the trainer has .*install the same on every node"):
        checked(torch="9.9")
    with pytest.raises(UserError, match=r"has grpo-cli .*other.*install the same"):
        checked(build="other")


def test_workers_that_may_round_otherwise_are_said_once():
    threads = torch.get_num_threads() + 1
    assert checked() == []
    [said] = checked(processor="another")
    assert "to rounding only" in said and "another" in said
    [said] = checked(threads=threads)
    assert f"OMP_NUM_THREADS={threads}" in said and f"engine.threads={threads - 1}" in said


def test_reasons_are_a_line():
    assert (
        reason_of(RuntimeError("\n  The actor is dead.\n\tclass_name: RayWorker")) == "RuntimeError: The actor is dead."
    )
    assert reason_of(RuntimeError("")) == "RuntimeError: no reason given"


def test_own_modules_are_found_by_workers(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", f"{sys.prefix}/lib/python3/site-packages"])
    monkeypatch.chdir(tmp_path)
    assert set(environment_of(1)["PYTHONPATH"].split(os.pathsep)) == {str(tmp_path)}
