"""Rollouts and updates on a GPU that is not there: no two devices or types meet, and how often the host has to wait.

The numbers are what a change may not make worse. The host reads what a step has drawn: that is the one wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import made
import pytest
import torch
from fake_cuda import CUDA, Watched, gpu, model_of
from made import infinite
from small import make_generation, scored, some_requests
from talk import Talk

from grpo_cli.collect.episodes import Conversation, Spent
from grpo_cli.config.instantiate import ready
from grpo_cli.engine.generation import Generation
from grpo_cli.engine.scheduling import Fifo
from grpo_cli.learner.batch import collate
from grpo_cli.learner.learner import Learner
from grpo_cli.model import flash
from grpo_cli.model.adapters import with_adapters
from grpo_cli.model.packed import allow_packing
from grpo_cli.native.ops import flat
from grpo_cli.settings import Sampling
from grpo_cli.support.meter import Meter
from grpo_cli.tasks.turns import completed_future
from grpo_cli.types import EngineStats, Request

SMALL: dict[str, Any] = dict(num_hidden_layers=1, vocab_size=600, hidden_size=64, intermediate_size=96)


@dataclass(frozen=True)
class Trial:
    """What each turn of the engine took, from one step's end to the next one's, and the lengths of its rollouts."""

    waits: list[int]
    kernels: list[int]
    casts: int
    stats: EngineStats
    lengths: list[int]


def trial(watched: Watched, model: Any, requests: Sequence[Request], *, fixed: bool = False, **parts: Any) -> Trial:
    """`fixed`: in steps of fixed shape, captured as far as a graph can be had."""
    marks, run = list[tuple[int, int]](), Generation._step

    def marked(self: Generation, *given: Any) -> Any:
        done = run(self, *given)
        marks.append((len(watched.waits), len(watched.kernels)))
        return done

    parts["capture"] = (lambda step: (step(), step)) if fixed else None
    generation, cast = make_generation(watched.decoder(model), requests, **parts), watched.casts
    with patch.object(Generation, "_step", marked):
        found = [rollout for _, rollout in generation.serve(Fifo())]
    taken = ([after - before for before, after in pairwise(of)] for of in zip(*marks, strict=True))
    return Trial(*taken, watched.casts - cast, generation.stats({}), [len(rollout) for rollout in found])


def adapted(model: Any) -> Any:
    lora = made.lora(rank=4, targets=("q_proj", "v_proj", "down_proj"))
    # PEFT moves adapters, which a fake parameter cannot be.
    with patch.object(torch.nn.Module, "to", lambda module, *_, **__: module), CUDA:
        return with_adapters(model, replace(made.model(), lora=lora)).eval()


@pytest.mark.parametrize(
    ("precision", "adapters", "fixed"),
    [("bfloat16", False, True), ("float32", False, False), ("autocast", True, False)],
)
def test_a_steady_step_waits_once_and_casts_no_weight(
    precision: str, adapters: bool, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = some_requests(prompts=2, n=2, tokens=7)
    with gpu(monkeypatch) as watched:
        model = model_of(watched, torch.bfloat16 if precision == "bfloat16" else torch.float32, **SMALL)
        model = adapted(model) if adapters else model
        with torch.autocast("cuda", torch.bfloat16) if precision == "autocast" else nullcontext():
            found = trial(watched, model, requests, fixed=fixed)
    assert found.lengths == [7, 7, 7, 7]
    assert found.waits == [1, 1, 1, 1, 1] and found.casts == 0


def test_rows_that_end_and_rows_that_enter_cost_one_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts' rows of 3 to 6 tokens in three slots: their ends, the holes, the second prompt's prefill."""
    requests = [
        replace(request, sampling=replace(request.sampling, max_new_tokens=3 + place % 4))
        for place, request in enumerate(some_requests(prompts=2, n=4))
    ]
    with gpu(monkeypatch) as watched:
        found = trial(watched, model_of(watched, **SMALL), requests, sampler=infinite(slots=3))
    assert sorted(found.lengths) == [3, 3, 4, 4, 5, 5, 6, 6]
    # In five turns somebody enters, and first tokens are read too.
    assert found.waits == [1, 2, 2, 2, 2, 1, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("policy", "protect", "fixed"),
    [("streaming", True, False), ("h2o", False, True), ("snapkv", True, False), ("rkv", False, True)],
)
def test_evictions_wait_for_nothing(policy: str, protect: bool, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows are cut down in a step: here all six, three at a time, in every other one."""
    words: dict[str, Any] = dict(budget=4, buffer=2, window=2, sinks=1, protect_prompt=protect, per_head=True)
    requests, sparsity = some_requests(prompts=2, n=3, tokens=9), ready("sparsity", policy, **words)
    with gpu(monkeypatch) as watched:
        model = model_of(watched, **SMALL | {"num_hidden_layers": 2})
        found = trial(watched, model, requests, sparsity=sparsity, fixed=fixed)
    assert found.lengths == [9] * 6 and found.waits == [1] * 7
    assert found.stats.details["engine/evictions"] >= 6


@pytest.mark.parametrize("fixed", [False, True])
def test_answers_of_an_environment_wait_for_nothing(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of 3 tokens, answered by 2. A turn's end is seen once the next step was launched; that step reads the
    turn's last token, as it must, and only what it drew is taken back: no step is lost."""

    class InTurns(Talk):
        def between(self, turns: Any, said: Any) -> Any:
            return [5, 6]

        def respond(self, prompt: Any, turns: Any) -> Any:
            return completed_future(["it goes on"])

    conversation = Conversation(InTurns(turns=3), lambda rollout: rollout, Spent())
    requests = some_requests(prompts=2, n=2, tokens=30, max_turn_tokens=3)
    with gpu(monkeypatch) as watched:
        found = trial(watched, model_of(watched, **SMALL), requests, fixed=fixed, observations=conversation)
    assert found.lengths == [3 + 2 + 3 + 2 + 3] * 4 and max(found.waits) == 1
    # The first token comes from the prefill.
    assert found.stats.generated_tokens == 4 * 9 and found.stats.decode_steps == 13 - 1


def test_kernels_of_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-1.7B, 64 rows of 4 prompts: of each layer, and of all else with the head and the drawing."""
    requests = some_requests(prompts=4, n=16, tokens=5)
    taken = []
    for layers in (1, 2):
        with gpu(monkeypatch) as watched:
            model = model_of(watched, num_hidden_layers=layers)
            taken.append(trial(watched, model, requests).kernels[-1])
    # One of a layer's six lays out queries by key head, in place of three copies inside the operation.
    assert (taken[1] - taken[0], 2 * taken[0] - taken[1]) == (1, 61)


# Updates, but for the backward pass, which PyTorch begins on a real one only


@pytest.mark.parametrize(
    ("packs", "precision", "adapters", "tokens"),
    [(False, "bfloat16", False, 28), (True, "float32", True, 28), (True, "autocast", True, 7)],
)
def test_an_update_mixes_no_devices_and_waits_thrice_whatever_it_is_cut_into(
    packs: bool, precision: str, adapters: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rollouts of three tokens of each of two prompts of four, in four micro-batches and one. The host waits for
    the metrics, the gradient's norm among them, for log-probabilities, and for whether the weights are finite; for what
    other passes find it waits once."""
    batch = collate([scored(0, 0, prompt=(place,) * 4, replies=[(1, 2, 3)] * 2) for place in range(2)])
    batch = replace(batch, advantages=torch.ones(len(batch.token_ids)))
    # Waits, but not where tensors are fake.
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", pytest.fail)
    with gpu(monkeypatch, host=True) as watched:
        model = model_of(watched, torch.bfloat16 if precision == "bfloat16" else torch.float32, **SMALL)
        allow_packing(model)  # as `load_model` does
        model = adapted(model) if adapters else model
        trained = [weight for weight in model.parameters() if weight.requires_grad]

        def backward(loss: Any) -> None:
            assert loss.device.type == "cuda" and loss.requires_grad
            for weight in trained:
                weight.grad = torch.zeros_like(weight)

        monkeypatch.setattr(torch.Tensor, "backward", backward)
        monkeypatch.setattr("grpo_cli.learner.forward.packs_rows", lambda *_: packs)
        settings = made.model("", autocast="bfloat16" if precision == "autocast" else "none")
        train = made.train(micro_batch_tokens=tokens)
        learner = Learner(model, made.loss(), settings, Sampling.plain(3), train, made.optim(), Meter(), pytest.fail)
        watched.waits.clear()
        assert learner.logprobs(model, batch).shape == (12,) and watched.waits == ["_to_copy"]
        for _ in range(2):
            watched.waits.clear()
            assert learner.update(batch, 0).stepped and watched.waits == ["_to_copy", "_to_copy", "_local_scalar_dense"]


@pytest.mark.parametrize("trees", [((6, 9, 5), (10,)), ((6, 14, 10),)], ids=["two", "one"])
def test_the_kernel_of_a_gpu_is_called_as_it_is_declared(trees: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees and plain sequences through PyTorch's own operators, and back, without a wait. (Autograd itself wants a
    driver.)"""
    with gpu(monkeypatch) as watched, torch.no_grad():
        q, k, v = (torch.empty(30, heads, 64, device=CUDA, dtype=torch.bfloat16) for heads in (6, 2, 2))
        out, logs = flash.forward(q, k, v, flat(trees), 0.125)
        gradients = flash.backward(out, q, k, v, out, logs, flat(trees), 0.125)
    assert out.shape == q.shape and [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    assert not watched.waits
