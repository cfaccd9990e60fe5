"""What holds on one machine, on others: numbers of threads, instruction sets, products that depend on their rows.

A test of bits runs where the engine finds that they can be held, and says so where they cannot.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import make_engine, require_bits, small_model, some_requests
from test_same_rollouts import embedded, same_in_short
from typed import done

from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.determinism import batch_invariant
from grpo_cli.engine.layers import NATIVE

SETTLED = """
import torch
from grpo_cli.config.prepare import pick_device
torch.set_num_threads(2)
pick_device("cpu")
weight = torch.nn.Parameter(torch.ones(100_000))
optimizer = torch.optim.AdamW([weight], betas=(0.9, 0.9), fused=True)
for gradient in [1e-20] + 600 * [0.0]:
    weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
bits = optimizer.state[weight]["exp_avg"].view(torch.int32).abs()
print([int(((half > 0) & (half < 1 << 23)).sum()) for half in bits.chunk(2)])
"""
WEIGHTS = "checkpoints/step_000002/model.safetensors"


def test_averages_of_no_gradient_come_to_be_0_in_every_thread() -> None:
    """They came to be denormal (below 1.2e-38, an exponent of 0 in their bits), which took an optimizer step 8 times as
    long, and stayed so: nine tenths of the smallest such number round to itself."""
    said = subprocess.run([sys.executable, "-c", SETTLED], capture_output=True, text=True, check=True)
    assert said.stdout == "[0, 0]\n"


class Uneven(torch.nn.Linear):
    """A product whose bits depend on the number of rows, as on an untested processor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 + 1e-6 * (x.shape[0] % 7))


class Crowded(torch.nn.Linear):
    """A product that is regular only for 24 rows or more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 + 1e-6 * (x.shape[0] < 24))


def with_product(kind: type[torch.nn.Linear], name: str) -> Any:
    own_shape = 25 + len(kind.__name__ + name)  # what was found is remembered by shape
    model = small_model(vocab_size=own_shape)
    for layer in model.model.layers:
        layer.mlp.get_submodule(name).__class__ = kind
    return model


@pytest.mark.parametrize("threads", [1, 16])
def test_a_product_that_depends_on_its_rows_is_found_out_and_said_once(threads: int) -> None:
    said: list[str] = []
    engine = make_engine(with_product(Uneven, "down_proj"), warn=said.append, threads=threads)
    assert engine.facts()["invariant"] is None  # nothing was tried yet
    for _ in range(2):
        list(engine.generate(some_requests(prompts=1, n=2, tokens=4)))
    assert engine.facts()["invariant"] is False
    assert len(said) == 1 and "a rollout is the same to rounding only" in said[0]


def test_rows_are_padded_until_they_agree() -> None:
    model = with_product(Crowded, "up_proj")
    require_bits(small_model())
    decoder, holds = batch_invariant(replace(Decoder.of(model), functions=NATIVE))
    assert holds and decoder.padding.least >= 24
    same_in_short(model, some_requests(prompts=2, n=8, tokens=14))


def test_no_bits_are_promised_in_bfloat16() -> None:
    said: list[str] = []
    engine = make_engine(small_model().to(torch.bfloat16), warn=said.append)
    list(engine.generate(some_requests(prompts=1, n=2, tokens=4)))
    assert engine.facts()["invariant"] is False and said == []


@pytest.mark.parametrize("threads", [2, pytest.param(3, marks=pytest.mark.matrix)], indirect=True)
def test_a_corrected_run_trains_to_the_same_weights_under_every_sampler(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importance weights are made of the sampler's log-probabilities: one bit of one token would move the weights."""
    monkeypatch.chdir(tmp_path)
    require_bits(embedded())
    words = ["logger=jsonl", "eval.every=0", "correction=tis", "n=16", "train.prompts=8", "train.steps=2"]
    words += [f"train.threads={threads}"]
    for name, sampler in (("full", []), ("infinite", ["sampler=infinite", "sampler.slots=16"])):
        done("train", *words, *sampler, f"hydra.run.dir={tmp_path / name}")
    full, infinite = (load_file(tmp_path / name / WEIGHTS) for name in ("full", "infinite"))
    start = load_file(tmp_path / "full" / WEIGHTS.replace("000002", "000000"))
    assert all(torch.equal(full[name], infinite[name]) for name in full)
    assert not all(torch.equal(full[name], start[name]) for name in full)
    summary = json.loads((tmp_path / "full" / "summary.json").read_text())
    assert summary["engine"]["invariant"] is True and summary["engine"]["threads"] == 1  # of the embedded model
