"""Memory plans: hand-worked bytes of a small model, plans against what real passes allocate, and monotonic peaks."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from made import full, infinite
from small import make_engine, small_model, some_requests

from grpo_cli.config.compose import settings_of
from grpo_cli.engine.eviction import Dense
from grpo_cli.engine.generation import Generation
from grpo_cli.learner.logprobs import chosen_logprobs
from grpo_cli.memory.allocations import ACTIVATIONS, LOGITS, Allocations
from grpo_cli.memory.plan import GRADIENTS, KV, OPTIMIZER, REFERENCE, WEIGHTS, WORKSPACE, StepShape, Workload, plan
from grpo_cli.memory.shapes import ShapeModel
from grpo_cli.model.anatomy import backbone
from grpo_cli.model.checkpointing import keep_little, last_states
from grpo_cli.model.load import load_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE = {"num_hidden_layers": 4, "hidden_size": 8, "intermediate_size": 12, "vocab_size": 20}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
SMALL = ("model=smollm2_135m", "model.random_init=true", *(f"model.architecture.{k}={v}" for k, v in SHAPE.items()))
LINEAR = 4 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 12)  # queries, output, keys, values and the MLP of four layers
NUMBERS = 20 * 8 + LINEAR + 4 * 2 * 8 + 8  # with a tied embedding and the norms
WORK = Workload((5, 7), 2, 17)


@cache
def shapes(device: torch.device, *words: str) -> ShapeModel:
    return ShapeModel(settings_of(*SMALL, "model.autocast=none", *words).model, device)


def step(slots: int | None = None, **words: Any) -> StepShape:
    sampler = full() if slots is None else infinite(slots=slots)
    given = {"m": WORK.n, "sampler": sampler, "sparsity": Dense(), "evaluation": None, "tokens": 64, "chunk": 4}
    return StepShape(WORK, **{**given, "share": True, **words})


def planned(device: torch.device = GPU, *words: str, **of: Any) -> Any:
    return plan(shapes(device, *words), step(**of)).phases


def test_what_shapes_alone_decide_has_the_bytes_that_one_counts_by_hand() -> None:
    found = planned(reference=True, optimizer=9, workspace=7)
    assert set(found) == {"prefill", "decode", "ref_logprobs", "forward", "backward", "optimizer"}
    for sizes in found.values():  # beside the weights two frequencies of rope
        assert abs(sizes[WEIGHTS] - 4 * NUMBERS) <= 16 and sizes[REFERENCE] == sizes[WEIGHTS]
        assert (sizes[OPTIMIZER], sizes[WORKSPACE]) == (9, 7)
    assert found["optimizer"][GRADIENTS] == 4 * NUMBERS
    # Four rows of 16 keys (the last token is never fed back) in blocks of 16, two prompts in one each; on a GPU, where
    # all is allocated at once, both prompts' also for one slot.
    token = 2 * 4 * 1 * 4 * 4
    assert found["decode"][KV] == (4 * 16 + 2 * 16) * token
    assert [planned(device, slots=1)["decode"][KV] for device in (CPU, GPU)] == [32 * token, 48 * token]
    # Of 4 rows, or of all rows of a step: logits, and two numbers for each in float32 (three for drawing).
    assert found["ref_logprobs"][LOGITS] == 4 * 20 * (4 + 8) and found["decode"][LOGITS] == 4 * 20 * (4 + 12)
    # A small model's weights are joined on a CPU, and a parked optimizer is not there before the update.
    assert planned(CPU)["decode"][ACTIVATIONS] - planned()["decode"][ACTIVATIONS] == 4 * (LINEAR + 160)
    kept = [planned(CPU, f"model.autocast={word}")["optimizer"][WORKSPACE] for word in ("bfloat16", "none")]
    assert kept[0] - kept[1] == 40 * 2**20, "by oneDNN, of products in bfloat16"
    parked = planned(parks=True, optimizer=100, evaluation=WORK)
    assert {name for name, sizes in parked.items() if sizes[OPTIMIZER]} == {"forward", "backward", "optimizer"}


def test_a_step_counts_a_shared_prompt_once_and_cuts_passes_at_a_row_or_more() -> None:
    one = step(tokens=30)
    assert one.tokens_of_update == 5 + 7 + 4 * 17 and replace(one, share=False).tokens_of_update == 2 * 12 + 4 * 17
    assert one.in_a_pass(80) == 30 and replace(one, tokens=1).in_a_pass(80) == 24 and one.in_a_pass(9) == 9
    assert replace(one, minibatches=3).tokens_of_update == 27


@pytest.mark.parametrize("word", ["autocast=none", "autocast=bfloat16", "lora.rank=2", "gradient_checkpointing=full"])
def test_passes_are_planned_as_they_allocate(word: str) -> None:
    """A pass of a model with all its layers, by real tensors; sizes that are in no line."""
    settings, spares = settings_of(*SMALL, "model.autocast=none", f"model.{word}").model, "bfloat16" not in word
    model, lines = load_model(settings, CPU), shapes(CPU, f"model.{word}").train_lines(4, spares)
    backbone(model).config._attn_implementation = "grpo_shapes"
    model.train()
    for tokens in (300, 1000):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        keep_little(model, spares)
        with Allocations(model) as seen:
            ids = torch.zeros(1, tokens, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16, enabled=settings.autocast == "bfloat16"):
                states = last_states(model, ids)[0].index_select(0, ids[0, :16])
                values = chosen_logprobs(model, states, ids[0, :16], 1.0, 4)
            forward = sum(seen.take_peak().values())
            del states
            values.sum().backward()
            backward = sum(seen.take_peak().values())
            del values
        moments = [sum(line(4, tokens).values()) for line in lines]
        assert (max(moments[:2]), max(moments[2:])) == pytest.approx((forward, backward), rel=0.002)


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_more_of_anything_never_takes_less(device: torch.device) -> None:
    base = step(slots=2)
    for steps in (
        [replace(base, tokens=10**6).with_n(n) for n in (2, 3, 8, 60, 400)],
        [step(slots=count) for count in (1, 2, 3, 4)],
        [replace(base.with_n(50), tokens=count) for count in (1, 30, 100, 1000, 3000)],
    ):
        rising = [sum(map(one.bytes_of, one.phases)) for one in (plan(shapes(device), of) for of in steps)]
        assert rising == sorted(rising) and rising[0] < rising[-1]


def test_a_first_pass_has_no_gradients_before_it_goes_back() -> None:
    one, several = (planned(tokens=tokens) for tokens in (80, 79))
    assert one["forward"][GRADIENTS] == 0 and several["forward"][GRADIENTS] == 4 * NUMBERS
    assert sum(one["backward"].values()) < sum(several["backward"].values())
    assert one["optimizer"] == several["optimizer"]


def test_quantised_weights_take_their_bits() -> None:
    words = "model.lora.rank=2", "model.dtype=bfloat16", "model.autocast=bfloat16"
    whole, found = (shapes(GPU, *words, *more) for more in ((), ("model.quantize=4bit",)))
    assert found.gradients == whole.gradients
    assert whole.weights - found.weights == pytest.approx(LINEAR * (2 - 4 / 8), rel=0.02)
    assert plan(found, step()).peak < plan(whole, step()).peak


def test_keys_and_copies_of_weights_are_freed_when_a_generation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    serve = Generation.serve

    def noted(generation: Generation, *of: Any, **more: Any) -> Any:
        made.append(weakref.ref(generation))
        return serve(generation, *of, **more)

    monkeypatch.setattr(Generation, "serve", noted)
    gc.disable()
    try:
        assert list(make_engine(small_model()).generate(some_requests())) and made
        assert all(one() is None for one in made)
    finally:
        gc.enable()
