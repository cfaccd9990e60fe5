"""What is predicted from shapes is what the run's own code then holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis
import made
import pytest
import torch
from hypothesis import strategies as st
from made import full, infinite, micro, prefix_head
from small import VOCABULARY, make_engine, one_and_the_rest, small_model, some_requests
from test_passes import make_batch

from grpo_cli.engine.kv.eviction import Dense
from grpo_cli.engine.order.schedule import Lpt
from grpo_cli.engine.torch import peak
from grpo_cli.engine.torch.peak import course
from grpo_cli.learner.forward import PackedTrees, Padded, RowShape
from grpo_cli.learner.logprobs import PLAIN
from grpo_cli.learner.optimizer import make_optimizer, state_bytes
from grpo_cli.methods.snapkv import SnapKv
from grpo_cli.model.adapters import with_adapters
from grpo_cli.model.checkpointing import recompute_layers
from grpo_cli.native.ops import no_tree_attention
from grpo_cli.profile import shapes
from grpo_cli.profile.allocations import ACTIVATIONS, LOGITS, Allocations
from grpo_cli.profile.estimate import GRADIENTS as HELD
from grpo_cli.profile.estimate import KINDS, Estimator, Passes, Prediction, StepShape, rows_of, total
from grpo_cli.profile.shapes import KV, EngineShape, ShapeModel, Workload
from grpo_cli.settings import OptimSettings
from grpo_cli.types import Prompt

LORA = made.model(lora=vars(made.lora(rank=2)) | {"targets": ["q_proj"]})
SNAPKV = SnapKv(budget=12, buffer=4, window=4, sinks=1, protect_prompt=True, per_head=True, kernel=3)


def fake_model(autocast: str = "none", **config: Any) -> ShapeModel:
    return ShapeModel(lambda: small_model(**config), autocast)


def work_of(requests: Any, n: int, tokens: int, lengths: Any = ()) -> Workload:
    prompts = tuple({request.prompt.id: request.prompt for request in requests}.values())
    return Workload.equal(prompts, n, tokens, lengths)


def test_what_is_alive_is_counted_by_what_it_is_for():
    model = small_model()
    vocabulary, hidden = model.config.vocab_size, model.config.hidden_size
    with Allocations(model) as allocations:
        states = torch.zeros(10, hidden)
        logits = model.lm_head(states)
        assert logits.shape == (10, vocabulary)
        assert allocations.take_peak() == {ACTIVATIONS: 10 * hidden * 4, LOGITS: 10 * vocabulary * 4}
        del logits
        assert allocations.take_peak() == {ACTIVATIONS: 10 * hidden * 4, LOGITS: 10 * vocabulary * 4}
        assert allocations.take_peak() == {ACTIVATIONS: 10 * hidden * 4}
        view = states[:3]
        assert allocations.take_peak() == {ACTIVATIONS: 10 * hidden * 4}, "a view takes nothing"
        del states, view
        allocations.take_peak()
        assert allocations.take_peak() == {}


BUDGET = infinite(kv_budget="200KiB")


@pytest.mark.parametrize(
    ("sampler", "sparsity"),
    [(full(), Dense()), (full(), SNAPKV), (micro(slots=5), Dense()), (infinite(slots=3), SNAPKV), (BUDGET, Dense())],
)
def test_predicted_keys_and_values_are_the_engines(sampler: Any, sparsity: Any):
    """To the byte where no order matters."""
    requests = some_requests(prompts=3, n=4, tokens=30)
    engine = make_engine(small_model(), sampler=sampler, sparsity=sparsity)
    made = {(r.request.prompt.id, r.request.sample): len(r) for r in engine.generate(requests)}
    lengths = tuple(made[request.prompt.id, request.sample] for request in requests)
    work = work_of(requests, 4, 30, lengths)
    _, decode = fake_model().rollouts(work, EngineShape(sampler, sparsity, 0))
    exactly = sampler == full() or sampler.kv_budget
    assert decode[KV] == pytest.approx(engine.stats().kv_peak_bytes, rel=0.0 if exactly else 0.1)


def fullest_step(model: Any, requests: Any, sampler: Any, native: bool) -> Any:
    engine = make_engine(model, sampler=sampler, eos_token_ids=(2000,), native=native)
    list(engine.generate(requests[:1]))  # what is tried once about the model is not looked at
    with Allocations(model) as allocations:
        list(engine.generate(requests))
        return allocations.take_peak()


@pytest.mark.parametrize("sampler", [full(), infinite(slots=4)])
def test_a_decode_step_is_predicted_to_hold_what_the_engines_fullest_one_holds(sampler: Any):
    """With so many words to choose from, no moment is as full as that at which a token is drawn."""
    model, requests = small_model(vocab_size=2000), some_requests(prompts=2, n=8, tokens=30)
    in_c, held = (fullest_step(model, requests, sampler, native) for native in (True, False))
    assert total(in_c) <= total(held)
    work = work_of(requests, 8, 30)
    _, decode = fake_model(vocab_size=2000).rollouts(work, EngineShape(sampler, Dense(), 0))
    assert decode[LOGITS] == held[LOGITS]
    assert total(decode) == pytest.approx(total(held), rel=0.001)


def test_who_waits_for_a_slot_after_a_prefix_keeps_its_keys():
    """2 layers, keys and values, 2 heads of 8 float32 numbers are 256 bytes. After prefixes of 5 tokens 11 of 12 wait:
    one has ended with the token that it was to wait with. After 2 tokens all do."""
    work = work_of(some_requests(prompts=3, n=4, tokens=30), 4, 30, (6, 7, *[30] * 10))
    sizes = [fake_model().rollouts(work, EngineShape(infinite(slots=3), Dense(), prefix))[1][KV] for prefix in (2, 5)]
    assert sizes[1] - sizes[0] == (11 * 5 - 12 * 2) * 256


@pytest.mark.parametrize(
    ("sampler", "waits"),
    [
        (micro(slots=5), True),
        (infinite(slots=12), False),
        (infinite(kv_budget="60KiB"), True),
        (infinite(kv_budget="40KiB"), False),
    ],
)
@pytest.mark.parametrize("sparsity", [Dense(), SNAPKV])
def test_predicted_keys_and_values_of_those_who_wait_are_the_engines_too(sampler: Any, waits: bool, sparsity: Any):
    requests = some_requests(prompts=3, n=4, tokens=30)
    parts: dict[str, Any] = dict(
        sampler=sampler, sparsity=sparsity, scheduler=Lpt(), predictor=prefix_head(prefix_tokens=5)
    )
    engine = make_engine(small_model(), eos_token_ids=(VOCABULARY,), warn=lambda text: None, **parts)
    list(engine.generate(requests))
    _, decode = fake_model().rollouts(work_of(requests, 4, 30), EngineShape(sampler, sparsity, 5))
    assert decode[KV] == pytest.approx(engine.stats().kv_peak_bytes, rel=0.2)
    assert ("engine/probe_steps" in engine.stats().details) == waits


def test_quantised_are_the_linear_layers_but_the_head():
    """Two layers of 32 x (32 + 16 + 16) + 32 x 32 + 3 x 32 x 64 numbers."""
    whole, four_bits = (
        ShapeModel(lambda: small_model(tie_word_embeddings=False), "none", bits).weights for bits in (None, 4.0)
    )
    assert whole - four_bits == 2 * (32 * 64 + 32 * 32 + 3 * 32 * 64) * (4 - 0.5)


def test_a_quantised_weight_is_whole_for_as_long_as_it_is_multiplied_by():
    """One layer and one token: nothing is as large as a weight of the MLP, 32 x 64 numbers, of which one is whole."""
    sizes = []
    for bits in (None, 4.0):
        model = ShapeModel(lambda: with_adapters(small_model(num_hidden_layers=1), LORA), "none", bits)
        passes = model.train_pass(Padded(1, 64, 1.0), (RowShape(1, 1),), False)
        sizes.append([found[ACTIVATIONS] for found in passes])
    for plain, quantised in zip(*sizes, strict=True):
        assert quantised - plain == pytest.approx(32 * 64 * 4, rel=0.2)


def test_offloaded_inputs_of_layers_take_nothing_between_the_passes():
    """Four layers' inputs of 400 tokens, 32 numbers each. There are the one that is computed with and, forward, the
    first, which transformers holds until that has ended; backward, the gradient that goes on to the layer before."""

    def load() -> Any:
        model = small_model(num_hidden_layers=4)
        recompute_layers(model, "full")
        return with_adapters(model, LORA)

    way, rows = Padded(400, 64, 1.0), (RowShape(100, 300),)
    plain, offloaded = (ShapeModel(load, "none", None, away).train_pass(way, rows, False) for away in (False, True))
    for kept, gone in zip(plain, offloaded, strict=True):
        assert kept[ACTIVATIONS] - gone[ACTIVATIONS] == pytest.approx(2 * 400 * 32 * 4, rel=0.001)


PACKED = [PackedTrees(10_000, 32, 1.0, natively=no_tree_attention(2, 2, 8) is None)]
WAYS = [Padded(10_000, 32, 1.0), *PACKED]


SEVERAL, LONG = [(30, [25, 10, 40, 40]), (12, [20])], [(100, [300, 200, 300])]
IN_TURN = [
    (WAYS[0], SEVERAL, "none"),
    (WAYS[1], SEVERAL, "bfloat16"),
    (WAYS[1], LONG, "none"),
]


def rows_like(groups: Any) -> tuple[RowShape, ...]:
    return tuple(RowShape(prompt, reply, i) for i, (prompt, replies) in enumerate(groups) for reply in replies)


def held_by(model: Any, way: Any, groups: Any, autocast: str = "none") -> list[Any]:
    """What a real pass holds at most, forward and backward."""
    way.prepare(model)
    with Allocations(model) as allocations:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast != "none"):
            values = way.logprobs(model.train(), make_batch(groups))
        forward = allocations.take_peak()
        values.sum().backward()
        return [forward, allocations.take_peak()]


@pytest.mark.parametrize(("way", "groups", "autocast"), IN_TURN, ids=str)
def test_a_predicted_pass_is_what_the_same_pass_holds(way: Any, groups: Any, autocast: str):
    real, rows = held_by(small_model(), way, groups, autocast), rows_like(groups)
    for found, predicted in zip(real, fake_model(autocast).train_pass(way, rows, False), strict=True):
        # Attention of fake tensors lays its results out differently, which costs or saves a copy.
        assert total(predicted) == pytest.approx(total(found), rel=0.05)
        # Of logits also those few bytes of a row that are allocated with them.
        assert predicted.get(LOGITS, 0) == pytest.approx(found.get(LOGITS, 0), rel=0.05)


@pytest.mark.parametrize("kind", ["dora", "rslora"])
def test_adapters_of_every_kind_are_planned_as_they_are(kind: str):
    """Of two layers of queries, 32 x 32, with rank 2. DoRA trains a magnitude for each row besides, and makes the whole
    matrix again to scale it; rsLoRA is another factor and nothing more."""

    def load() -> Any:
        return with_adapters(small_model(), replace(LORA, lora=replace(LORA.lora, **{kind: True})))

    shape, plain, model = (
        ShapeModel(load, "none"),
        ShapeModel(lambda: with_adapters(small_model(), LORA), "none"),
        load(),
    )
    trained = [one for one in model.parameters() if one.requires_grad]
    assert [one.shape for one in shape.trained] == [one.shape for one in trained]
    more = 2 * 32 if kind == "dora" else 0
    assert sum(one.numel() for one in trained) - sum(one.numel() for one in plain.trained) == more

    forward, backward = shape.train_pass(WAYS[0], rows_like(SEVERAL), False)
    for found, predicted in zip(held_by(model, WAYS[0], SEVERAL), (forward, backward), strict=True):
        assert total(predicted) == pytest.approx(total(found), rel=0.05)
    before, _ = plain.train_pass(WAYS[0], rows_like(SEVERAL), False)
    assert (forward[ACTIVATIONS] > before[ACTIVATIONS]) == (kind == "dora")


def recomputed(model: Any) -> Any:
    recompute_layers(model, "full")
    return model


DEEP = {
    "plain": (lambda: small_model(num_hidden_layers=7), {}),
    "bfloat16": (lambda: small_model("qwen3", num_hidden_layers=8), {"autocast": "bfloat16"}),
    "recomputed": (lambda: recomputed(small_model("llama", num_hidden_layers=7)), {"autocast": "bfloat16"}),
    "offloaded": (lambda: with_adapters(recomputed(small_model(num_hidden_layers=7)), LORA), {"offload": True}),
    "adapters": (lambda: with_adapters(small_model(num_hidden_layers=9), LORA), {"autocast": "bfloat16"}),
    "4bit": (lambda: with_adapters(small_model(num_hidden_layers=7), LORA), {"bits": 4.0}),
}


@pytest.mark.parametrize("kind", one_and_the_rest([*DEEP], "adapters"))
def test_a_few_layers_stand_for_all_of_them(kind: str, monkeypatch: pytest.MonkeyPatch):
    load, words = DEEP[kind]
    way = list(DEEP).index(kind) % len(WAYS)
    rows = tuple(RowShape(prompt, reply, prompt) for prompt, replies in SEVERAL for reply in replies)
    work, kinds = work_of(some_requests(prompts=2, n=4), 4, 60), (Dense(), SNAPKV)
    engines = [EngineShape(infinite(slots=3), kind, 0) for kind in kinds]

    def found() -> list[Any]:
        model = ShapeModel(load, **({"autocast": "none"} | words))
        passes = [model.train_pass(WAYS[way], rows, later) for later in (False, True)]
        quiet = model.quiet_pass(WAYS[way], rows)
        return [*passes, quiet, *(model.rollouts(work, engine) for engine in engines)]

    few = found()
    monkeypatch.setattr(shapes, "_make", lambda layer: object())  # no two of which are alike
    monkeypatch.setattr(peak, "of_few_blocks", lambda decoder: decoder)
    assert few == found()


def test_a_few_rows_of_logits_stand_for_all_of_a_chunk(monkeypatch: pytest.MonkeyPatch):
    """16 rows are computed on at a time, for a vocabulary of 2^17."""
    sizes = []
    for by_row in (shapes._FEW_ROWS, PLAIN):
        monkeypatch.setattr(shapes, "_FEW_ROWS", by_row)
        model = fake_model(num_hidden_layers=1, vocab_size=2**17)
        sizes.append(
            [total(found) for found in model.train_pass(Padded(10_000, 256, 1.0), (RowShape(10, 300),), False)]
        )
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-4)


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_one_part_of_a_step_stands_for_all_that_are_drawn_from(autocast: str, monkeypatch: pytest.MonkeyPatch):
    """A CPU converts four rows of a vocabulary of 2^17 at a time, of 24. A GPU converts all, and so holds 24 rows of
    float32 more, and probabilities of as many where a CPU has those of a few."""
    work = work_of(some_requests(prompts=2, n=12, tokens=8), 12, 8)

    def found(on_cpu: bool) -> tuple[int, int]:
        model = ShapeModel(lambda: small_model(num_hidden_layers=1, vocab_size=2**17), autocast, on_cpu=on_cpu)
        prefill, decode = map(total, model.rollouts(work, EngineShape(full(), Dense(), 0)))
        return prefill, decode

    few, on_gpu = found(on_cpu=True), found(on_cpu=False)
    monkeypatch.setattr(peak, "rows_at_once", lambda logits: len(logits))
    assert few == pytest.approx(found(on_cpu=True), rel=1e-4)
    more = 2 * (24 - 4) * 2**17 * 4 if autocast == "bfloat16" else 0
    assert [gpu - cpu for gpu, cpu in zip(on_gpu, few, strict=True)] == pytest.approx([more, more], rel=0.02, abs=64)


def plan(requests: Any, n: int, m: int, *, slots: int | None = None, tokens: int = 400) -> StepShape:
    sampler = full() if slots is None else infinite(slots=slots)
    passes = Passes(policy_over_all=False, policy_over_kept=False, reference=False)
    engine, forward = EngineShape(sampler, Dense(), 0), Padded(tokens, 64, 1.0)
    return StepShape(work_of(requests, n, 30), m, engine, None, forward, 1, passes)


def test_every_phase_holds_the_optimizer_and_what_lies_beside_the_model():
    model = fake_model()
    found = Estimator(model, optimizer=11, other=7).predict(plan(some_requests(prompts=2, n=4), 4, 4)).phases
    assert {(sizes["optimizer"], sizes["other"], sizes["weights"]) for sizes in found.values()} == {
        (11, 7, model.weights)
    }
    assert found["optimizer"][HELD] == sum(p.numel() * 4 for p in model.trained)
    assert all(set(sizes) <= set(KINDS) for sizes in found.values())


def test_graphs_hold_whole_slots_while_rollouts_are_made_and_nothing_after() -> None:
    shape, model = plan(some_requests(prompts=2, n=4), 4, 4, slots=3), fake_model("bfloat16")
    assert shape.engine is not None
    graphs = replace(shape, engine=replace(shape.engine, graphs=True))
    plain, held = (Estimator(model, 0, 0).predict(step).phases for step in (shape, graphs))
    # Of 2 layers with 2 heads of 8 numbers in bfloat16: 3 slots of 30 tokens, 2 prompts; each in whole tiles.
    (slots,) = {held[phase][KV] for phase in ("prefill", "decode")}
    prompts = slots - 2 * 2 * 2 * 8 * 2 * 3 * 32
    assert prompts > 0 and prompts % (2 * 2 * 2 * 8 * 2 * 2 * 8) == 0
    assert all(held[phase] == plain[phase] for phase in ("forward", "backward", "optimizer"))


def test_a_larger_group_of_which_few_are_kept_is_still_of_which_few_are_kept():
    estimator, requests = Estimator(fake_model(), 0, 0), some_requests(prompts=1, n=8)
    kept, whole = plan(requests, 8, 2, slots=4, tokens=10_000), plan(requests, 8, 8, slots=4, tokens=10_000)
    room = int(estimator.predict(whole).peak * 1.5)
    assert estimator.largest(kept, room)["n"] == 0 and estimator.largest(whole, room)["n"] not in (0, None)


def _predicted(given: StepShape, phase: str) -> int:
    return total(Estimator(fake_model(), 0, 0).predict(given).phases[phase])


def test_a_minibatch_takes_what_its_own_rollouts_take():
    two, one = plan(some_requests(prompts=2, n=4), 4, 4), plan(some_requests(prompts=1, n=4), 4, 4)
    for phase in ("forward", "backward"):
        assert _predicted(replace(two, minibatches=2), phase) == _predicted(one, phase) < _predicted(two, phase)


def test_the_policy_goes_over_all_rollouts_or_over_the_kept_ones():
    few, all_of_them = plan(some_requests(prompts=1, n=8), 8, 2), plan(some_requests(prompts=1, n=8), 8, 8)
    over_all, over_kept = Passes(True, False, False), Passes(False, True, False)
    asked = [(few, over_all), (all_of_them, over_kept), (few, over_kept)]
    sizes = [_predicted(replace(given, passes=passes), "policy_logprobs") for given, passes in asked]
    assert sizes[0] == sizes[1] > sizes[2]


@pytest.mark.parametrize("tokens", [1, 200])
def test_an_evaluation_takes_the_more_of_its_beginning_and_its_going_on(tokens: int):
    exam = work_of(some_requests(prompts=3, n=8), 8, tokens)
    given = replace(plan(some_requests(prompts=1, n=2), 2, 2), evaluation=exam)
    assert given.engine is not None
    beginning, going_on = (total(sizes) for sizes in fake_model().rollouts(exam, given.engine))
    assert (beginning > going_on) == (tokens == 1), "both cases are tried"
    assert _predicted(given, "eval") == fake_model().weights + max(beginning, going_on)


def test_the_largest_micro_batch_counts_and_the_first_alone_has_no_gradients_beside_it():
    requests = some_requests(prompts=1, n=6)
    work = work_of(requests, 6, 30, (5, 5, 30, 20, 10, 5))
    way = PackedTrees(len(requests[0].prompt.token_ids) + 30, 64, 1.0)  # two rows at most, or the longest by itself
    given = replace(plan(requests, 6, 6), rollouts=work, forward=way)
    rows = [RowShape(len(requests[0].prompt.token_ids), length, 0) for length in work.lengths]
    model, parts = fake_model(), [tuple(rows[i] for i in part) for part in way.cut(rows)]
    assert len({way.size(part) for part in parts[1:]}) > 1
    passes = [model.train_pass(way, part, place > 0) for place, part in enumerate(parts)]
    for phase, sizes in zip(("forward", "backward"), zip(*passes, strict=True), strict=True):
        assert _predicted(given, phase) == model.weights + max(map(total, sizes))


def test_of_another_engine_only_the_update_is_predicted():
    given = replace(plan(some_requests(prompts=2, n=8), 8, 8), engine=None)
    estimator = Estimator(fake_model(), optimizer=0, other=0)
    assert set(estimator.predict(given).phases) == {"forward", "backward", "optimizer"}
    assert set(estimator.largest(given, 10**9)) == {"n", "train.micro_batch_tokens"}


def _optim(**words: Any) -> OptimSettings:
    return made.optim(lr=1e-3, warmup_steps=0, **words)


def test_an_optimizer_is_predicted_to_hold_what_it_then_holds():
    weights = [torch.zeros(300, 20, requires_grad=True), torch.zeros(5, requires_grad=True)]
    held = {}
    for offload in (False, True):
        optimizer = make_optimizer(weights, _optim(offload=offload))
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        state = [value for one in optimizer.state_dict()["state"].values() for value in one.values()]
        held[offload] = sum(value.nbytes for value in state)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert state_bytes(weights, _optim(), cpu) == state_bytes(weights, _optim(), gpu) == held[False] == 2 * 24_020 + 8
    assert state_bytes(weights, _optim(offload=True), cpu) == held[True] + 24_020, "and the copies that it works on"
    assert state_bytes(weights, _optim(offload=True), gpu) == 0, "all of it is in the memory of the CPU"
    # 6,000 numbers: a byte each and 24 scales, twice; 5 numbers: float32, twice; two maps of 256 float32.
    assert state_bytes(weights, _optim(name="adamw8bit"), gpu) == 2 * (6000 + 4 * 24) + 2 * 4 * 5 + 2048


def test_the_largest_values_fit_and_twice_as_much_does_not():
    estimator, given = Estimator(fake_model(), optimizer=0, other=0), plan(some_requests(prompts=2, n=8), 8, 8)
    room = estimator.predict(given).peak * 2
    largest = estimator.largest(given, room)
    assert largest["n"] is not None and largest["n"] >= 8
    bigger = plan(some_requests(prompts=2, n=2 * largest["n"] + 2), 2 * largest["n"] + 2, 2 * largest["n"] + 2)
    fitting = plan(some_requests(prompts=2, n=largest["n"]), largest["n"], largest["n"])
    assert estimator.predict(fitting).peak <= room < estimator.predict(bigger).peak
    assert estimator.largest(given, 1000) == dict.fromkeys(largest)
    assert estimator.largest(given, 10**15) == dict.fromkeys(largest, 0), "there is no largest"


class _Straight(Estimator):
    """As if each of the rollouts of a prompt took as much, up to `most` of them, which a pass holds."""

    def __init__(self, each: int, most: int) -> None:
        super().__init__(fake_model(), optimizer=0, other=0)
        self.each, self.most, self.asked = each, most, list[int]()

    def predict(self, step: StepShape, *_: Any, **__: Any) -> Prediction:
        self.asked.append(step.m)
        return Prediction({"backward": {ACTIVATIONS: self._model.weights + self.each * min(step.m, self.most)}})


@hypothesis.given(
    each=st.integers(1, 10**6), most=st.integers(2, 200), start=st.integers(1, 300), fits=st.floats(0.1, 1.2)
)
@hypothesis.settings(deadline=None)
def test_the_largest_that_fits_is_found_in_a_few_predictions(each: int, most: int, start: int, fits: float):
    estimator, given = _Straight(each, most), plan(some_requests(prompts=1, n=2), 2, 2)
    weights = total(estimator._steady(given))
    room = weights + int(fits * each * most)
    found = estimator._most(lambda m: replace(given, m=m), min(start, 256), 1, 256, room)
    assert len(estimator.asked) <= 9

    def peak(m: int) -> int:
        return weights + each * min(m, most)

    if found is None:
        assert peak(1) > room
    elif found == 0:
        assert peak(256) <= room
    else:
        assert peak(found) <= room
        assert peak(found + max(1, found // 8)) > room or room - peak(found) < 0.05 * (room - weights)


def test_what_a_pass_holds_is_halved_where_less_takes_as_much():
    """A pass holds 8 rollouts, and 7 fit: 16, 11, 10 take as much as 8."""
    estimator, given = _Straight(1000, 8), plan(some_requests(prompts=1, n=2), 2, 2)
    room = total(estimator._steady(given)) + 7500
    assert estimator._most(lambda m: replace(given, m=m), 16, 2, 64, room) == 7
    assert len(estimator.asked) <= 6, estimator.asked


def test_the_pass_that_is_beyond_the_room_by_itself_is_asked_first(monkeypatch: pytest.MonkeyPatch):
    requests = some_requests(prompts=1, n=5)
    way = Padded(4 * (len(requests[0].prompt.token_ids) + 30), 64, 1.0)  # four rows, and one
    model, asked = fake_model(), list[tuple[int, bool]]()
    given, train_pass = replace(plan(requests, 5, 5), forward=way), model.train_pass

    def counted(forward: Any, rows: Any, later: bool) -> Any:
        asked.append((len(rows), later))
        return train_pass(forward, rows, later)

    monkeypatch.setattr(model, "train_pass", counted)
    estimator = Estimator(model, optimizer=0, other=0)
    peak = estimator.predict(given).peak
    assert asked == [(4, False), (1, True)]
    asked.clear()
    assert estimator.predict(given, room=model.weights + 1).peak > model.weights + 1
    assert asked == [(4, False)] and peak > model.weights


def test_where_slots_are_refilled_they_stay_full_to_the_longest():
    words: dict[str, Any] = dict(prompt_tokens={"a": 16}, refills=True, page=16, most=999, blocks=4)
    first, last = course([20, 30, 300], "aaa", slots=2, **words).moments
    assert [first.tolist(), last.tolist()] == [[1, 1], [299]]
    (only,) = course([1, 1], "aa", slots=2, **words).moments
    assert only.tolist() == [1, 1], "there is no second token, but there is an answer"


def test_an_evaluation_is_predicted_with_the_rows_that_it_has_at_a_time():
    few = plan(some_requests(prompts=2, n=100), 100, 4)
    many = some_requests(prompts=50, n=10)
    estimator = Estimator(fake_model(), optimizer=0, other=0)
    held = [
        estimator.predict(replace(few, evaluation=work_of(asked, 10, 30))).phases["eval"]["kv"]
        for asked in (many[:200], many)
    ]
    assert held[1] < 1.3 * held[0], "200 rows each, though there are 500 rollouts"


def test_groups_of_different_sizes_are_rows_and_tokens_each_for_itself():
    """Prompts of 2 and 3 tokens with rollouts of 4 and 1, and of 5."""
    prompts = (Prompt("a", (1, 2), ""), Prompt("b", (1, 2, 3), ""))
    work = Workload(prompts, ((4, 1), (5,)), 6)
    assert work.n == 2 and work.lengths == (4, 1, 5) and work.tokens == 2 + 4 + 2 + 1 + 3 + 5
    assert [(row.prompt, row.completion) for row in rows_of(work, 2)] == [(2, 4), (2, 1), (3, 5)]
    assert [(row.prompt, row.completion) for row in rows_of(work, 1)] == [(2, 4), (3, 5)]
    assert [request.prompt.id for request in work.requests] == ["a", "a", "b"]
    assert work.at_full_length().groups == ((6, 6), (6,))
