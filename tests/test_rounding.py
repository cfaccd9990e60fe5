"""Weights rounded in blocks: the numbers, rollouts by a rounded copy, and passes that round alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import adapted_model, make_engine, small_model, some_requests
from test_learner import make_batch, steep
from test_resume import rows, trained

from grpo_cli.config.compose import settings_of
from grpo_cli.config.prepare import prepare
from grpo_cli.experiment import build
from grpo_cli.learner.learner import Learner
from grpo_cli.model.rounding import layers_to_round, rounded, rounded_in_place
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.support.meter import NullMeter

KINDS = ("int8", "fp8", "int4")


def test_numbers_by_hand() -> None:
    """Of a block whose largest is 7, int4 has the whole numbers; of one whose largest is 127, int8 has; of one whose
    largest is 448, fp8 has those with four binary digits: 17 lies between 16 and 18, and the even digit is taken."""
    assert rounded(torch.tensor([[7.0, -2.4, 0.6], [0.5, 1.5, 0.0]]), "int4").tolist() == [[7, -2, 1], [0, 2, 0]]
    assert rounded(torch.tensor([[127.0, 2.4, -3.6]]), "int8").tolist() == [[127, 2, -4]]
    assert rounded(torch.tensor([[448.0, 17.0, -19.0, 0.3]]), "fp8").tolist() == [[448, 16, -20, 0.3125]]
    assert rounded(torch.tensor([[0.3]]), "none").tolist() == [[torch.tensor(0.3).item()]]
    assert rounded(torch.zeros(2, 2), "int8").tolist() == [[0, 0], [0, 0]]


def test_each_block_of_128_by_128_has_its_own_scale() -> None:
    weight = torch.full((130, 129), 0.4)
    weight[0, 0], weight[0, 128], weight[128, 0], weight[129, 128] = 7.0, 70.0, 0.7, 700.0
    found = rounded(weight, "int4")
    assert found[1, 1] == 0.0, "0.4 of 7"
    assert found[1, 128] == 0.0, "of 70"
    assert found[129, 5].item() == pytest.approx(0.4, abs=1e-6), "of 0.7, in steps of a tenth"
    assert found[128, 128] == 0.0 and found[129, 128] == 700.0


@given(st.integers(1, 140), st.integers(1, 140), st.integers(0, 99), st.sampled_from(KINDS))
def test_errors_are_bounded_and_rounding_twice_changes_nothing(a: int, b: int, seed: int, kind: Any) -> None:
    weight = torch.randn(a, b, generator=torch.Generator().manual_seed(seed))
    once = rounded(weight, kind)
    step = {"int8": 1 / 127 / 2, "int4": 1 / 7 / 2, "fp8": 1 / 28}[kind]  # fp8: of 448 the last digit is 32
    assert (once - weight).abs().max() <= weight.abs().max() * step * 1.001
    torch.testing.assert_close(rounded(once, kind), once, rtol=1e-6, atol=1e-9)


def test_fewer_bits_err_more() -> None:
    weight = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    errors = [float((rounded(weight, kind) - weight).square().mean()) for kind in ("none", *KINDS)]
    assert errors == sorted(errors) and errors[0] == 0.0 and len(set(errors)) == 4


def with_rounded_weights(model: Any, kind: Any) -> Any:
    for layer in layers_to_round(model):
        layer.weight.data = rounded(layer.weight.data, kind)
    return model


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rollouts_are_those_of_a_model_with_rounded_layers(
    kind: Any, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; and the weights that are trained, the head's among them, are as they were."""
    monkeypatch.setattr("grpo_cli.engine.step.decoder.PACKED_FROM", 1 if packed else 10**9)
    model, requests = small_model(), some_requests()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ours = {(r.request.prompt.id, r.request.sample): r for r in make_engine(model, quantize=kind).generate(requests)}
    plain = with_rounded_weights(small_model(), kind)
    theirs = {(r.request.prompt.id, r.request.sample): r for r in make_engine(plain).generate(requests)}
    assert ours == theirs and ours != dict.fromkeys(ours)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    whole = {(r.request.prompt.id, r.request.sample): r for r in make_engine(small_model()).generate(requests)}
    assert ours != whole


def test_the_copy_is_made_anew_after_an_update_and_evaluations_are_not_rounded() -> None:
    model, requests = small_model(), some_requests(1, 2)
    engine = make_engine(model, quantize="int4")
    first = list(engine.generate(requests))
    with torch.no_grad():
        for layer in layers_to_round(model):
            layer.weight.mul_(1.3)
    assert list(engine.generate(requests)) != first
    measured = [replace(request, held_out=True) for request in requests]
    assert [one.token_ids for one in engine.generate(measured)] == [
        one.token_ids for one in make_engine(model).generate(measured)
    ]


def learner_of(model: Any, kind: str) -> Learner:
    train = made.train(micro_batch_tokens=10_000, logprob_chunk=64)
    settings = made.model("", fake_quantize=kind)
    return Learner(model, steep, settings, Sampling.plain(4), train, made.optim(lr=0.1, warmup_steps=0), NullMeter())


@pytest.mark.parametrize("kind", KINDS)
def test_both_passes_round_alike(kind: Any) -> None:
    """The learner with fake_quantize has the log-probabilities of a model with rounded layers to the bit; so has (see
    above) the engine that quantizes: between two passes of one shape the difference is 0."""
    model, batch = small_model(), make_batch()
    rounding, plain = learner_of(model, kind), with_rounded_weights(small_model(), kind)
    alike = learner_of(plain, "none").logprobs(plain, batch)
    assert torch.equal(rounding.logprobs(model, batch), alike)
    assert not torch.equal(learner_of(small_model(), "none").logprobs(small_model(), batch), alike)
    assert torch.equal(rounding.update(batch, 0).logprobs, alike)


def test_gradients_pass_straight_through_to_the_weights_that_are_not_rounded() -> None:
    model, plain, batch = small_model(), with_rounded_weights(small_model(), "int4"), make_batch()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    rounding, at = learner_of(model, "int4"), learner_of(plain, "none")
    assert rounding.update(batch, 0).metrics["optim/grad_norm"] == at.update(batch, 0).metrics["optim/grad_norm"]
    rounded_first = with_rounded_weights(small_model(), "int4").state_dict()
    for name, weight in model.state_dict().items():  # AdamW's first step does not depend on the weights without decay
        moved, its = weight - before[name], plain.state_dict()[name] - rounded_first[name]
        torch.testing.assert_close(moved, its, atol=1e-6, rtol=0)
        assert moved.abs().max() > 0


def test_an_error_inside_leaves_the_weights_as_they_were() -> None:
    model = small_model()
    layer = layers_to_round(model)[0]
    place, before = layer.weight.data_ptr(), layer.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), rounded_in_place(model, "int4"):
        assert not torch.equal(layer.weight, before)
        raise ZeroDivisionError
    assert torch.equal(layer.weight, before) and layer.weight.data_ptr() == place


def test_adapters_are_not_rounded() -> None:
    pytest.importorskip("peft")
    model, requests = adapted_model(), some_requests()
    assert {type(one).__name__ for one in layers_to_round(model)} == {"Linear"} and len(layers_to_round(model)) == 14
    ours = list(make_engine(model, quantize="int4").generate(requests))
    for layer in layers_to_round(model):
        layer.weight.data = rounded(layer.weight.data, "int4")
    assert list(make_engine(model).generate(requests)) == ours


RUN = ("n=8", "train.prompts=4", "sampling.max_new_tokens=32", "train.steps=1")


def test_the_mismatch_of_a_run_grows_with_fewer_bits_and_goes_where_both_round(tmp_path: Path) -> None:
    found = {}
    for name, words in {
        "none": (),
        **{kind: (f"engine.quantize={kind}",) for kind in KINDS},
        "both": ("engine.quantize=int4", "model.fake_quantize=int4"),
    }.items():
        trained(tmp_path / name, *RUN, *words)
        found[name] = float(rows(tmp_path / name)[-1]["mismatch/kl"])  # type: ignore[arg-type]
    assert 1e-6 < found["int8"] < found["fp8"] < found["int4"]
    assert found["none"] < 1e-7 and found["both"] < 1e-7, "what is left is that of float32 products of other shapes"


def refused(*words: str) -> str:
    with pytest.raises(UserError) as error:
        prepare(settings_of(*words))
    return str(error.value)


def test_what_cannot_be_rounded_is_refused() -> None:
    four = ("model.quantize=4bit", "model.lora.rank=4", "device=cuda")
    assert "engine.quantize=int8 rounds plain weights, and model.quantize=4bit" in refused(
        *four, "engine.quantize=int8"
    )
    assert "model.fake_quantize=fp8 rounds plain weights" in refused(*four, "model.fake_quantize=fp8")
    assert "which engine.quantize=int8 is not" in refused("engine.quantize=int8", "correction.prox=drawn")
    ray = ("engine=ray", "+engine.options.quantize=int8", "correction.prox=drawn")
    assert "which engine.quantize=int8 is not" in refused(*ray)
    assert "engine.quantize=int3" in refused("engine.quantize=int3")
    assert "model.fake_quantize" in refused("model.fake_quantize=int3")


def test_dora_s_lengths_are_of_weights_that_are_not_rounded(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    words = ("engine.quantize=int8", "model.lora.rank=2", "model.lora.dora=true", f"run_dir={tmp_path}")
    with pytest.raises(UserError, match="engine.quantize=int8 rounds plain weights, and .*model.lora.dora"):
        build(settings_of(*words))
