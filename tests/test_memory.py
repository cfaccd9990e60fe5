"""Memory plans: hand-worked bytes of a small model, plans against what real passes allocate, and monotonic peaks."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from made import full, infinite
from small import make_engine, small_model, some_requests
from test_resume import WORDS, rows
from typed import done, refused

from grpo_cli.config.compose import settings_of
from grpo_cli.config.instantiate import ready
from grpo_cli.config.prepare import prepare
from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.eviction import Dense
from grpo_cli.engine.generation import Generation
from grpo_cli.learner.logprobs import chosen_logprobs
from grpo_cli.memory import fit
from grpo_cli.memory.out_of_memory import breakdown
from grpo_cli.memory.plan import GRADIENTS, KV, OPTIMIZER, REFERENCE, WEIGHTS, WORKSPACE, StepShape, Workload, plan
from grpo_cli.memory.planner import Planner
from grpo_cli.memory.profile import GPUS
from grpo_cli.memory.shapes import ACTIVATIONS, LOGITS, Allocations, ShapeModel
from grpo_cli.model.anatomy import backbone
from grpo_cli.model.checkpointing import keep_little, last_states
from grpo_cli.model.load import load_model
from grpo_cli.report.tables import show_profiles
from grpo_cli.runs.files import read_object
from grpo_cli.settings import GpuWord
from grpo_cli.support import memory
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import parse_bytes
from grpo_cli.support.memory import is_out_of_memory

pytestmark = pytest.mark.usefixtures("elsewhere")
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
    return StepShape(WORK, **{**given, "shares_prompts": True, **words})


def planned(device: torch.device = GPU, *words: str, **of: Any) -> Any:
    return plan(shapes(device, *words), step(**of))


def test_what_shapes_alone_decide_has_the_bytes_that_one_counts_by_hand():
    found = planned(reference=True, optimizer=9, workspace=7)
    assert set(found) == {"prefill", "decode", "ref_logprobs", "forward", "backward", "optimizer"}
    for sizes in found.values():  # beside the weights two frequencies of rope
        assert abs(sizes[WEIGHTS] - 4 * NUMBERS) <= 16 and sizes[REFERENCE] == sizes[WEIGHTS]
        assert (sizes[OPTIMIZER], sizes[WORKSPACE]) == (9, 7)
    assert found["optimizer"][GRADIENTS] == 4 * NUMBERS
    # Four rows of 16 keys (the last token is never fed back) in blocks of 8, two prompts in one each; on a GPU, where
    # all is allocated at once, both prompts' also for one slot.
    token = 2 * 4 * 1 * 4 * 4
    assert found["decode"][KV] == (4 * 16 + 2 * 8) * token
    assert [planned(device, slots=1)["decode"][KV] for device in (CPU, GPU)] == [24 * token, 32 * token]
    policies = (ready("sparsity", name, budget=8, window=3) for name in ("snapkv", "streaming"))
    scored, latest = (planned(sparsity=policy)["decode"][KV] for policy in policies)
    assert scored - latest == 4 * 3 * 2 * 4 * (4 * 4), "a row's last three queries, two to a key-value head"
    # Of 4 rows: logits, and two numbers for each in float32 (three for drawing). A GPU's graphs have 16 rows at least,
    # and keep their memory beside a prefill, and beside a step of half as many rows.
    logits = [planned(device)[phase][LOGITS] for phase in ("prefill", "decode") for device in (CPU, GPU)]
    few, rows = 4 * 20 * (4 + 12), 16 * 20 * (4 + 12)
    assert found["ref_logprobs"][LOGITS] == 4 * 20 * (4 + 8) and logits == [few, 2 * rows, few, 3 * rows // 2]
    # The attention that keys receive is PyTorch's on a GPU: 8 bytes of each number of the 16 rows' 8 + 16 keys.
    latest, received = (planned(sparsity=ready("sparsity", name, budget=8, window=3)) for name in ("streaming", "h2o"))
    assert received["decode"][ACTIVATIONS] - latest["decode"][ACTIVATIONS] == 8 * 16 * 4 * (8 + 16)
    # A small model's weights are joined on a CPU, and a parked optimizer is not there before the update.
    on_cpu, on_gpu = (plan(shapes(device), step().with_n(8))["decode"][ACTIVATIONS] for device in (CPU, GPU))
    assert on_cpu - on_gpu == 4 * (LINEAR + 160)
    kept = [planned(CPU, f"model.autocast={word}")["optimizer"][WORKSPACE] for word in ("bfloat16", "none")]
    assert kept[0] - kept[1] == 52 * 2**20, "by oneDNN, of products in bfloat16"
    room = [planned(CPU, shares_prompts=one)["optimizer"][WORKSPACE] for one in (True, False)]
    assert room[0] - room[1] == torch.get_num_threads() * 4 * (5 * 48 * 16 + 32 * (2 * 48 + 4 * 16)), "attention in C"
    for updates, there in ((1, {"optimizer"}), (2, {"forward", "backward", "optimizer"})):
        parked = planned(parks=True, optimizer=100, evaluation=WORK, average=30, updates=updates)
        assert {name for name, sizes in parked.items() if sizes[OPTIMIZER] == 100} == there
        assert parked["decode"][OPTIMIZER] == 30, "an average of the weights stays where they are"


def test_a_step_counts_a_shared_prompt_once_and_cuts_passes_at_a_row_or_more():
    one = step(tokens=30)
    alone = replace(one, shares_prompts=False)
    assert (one.tokens_of_update, alone.tokens_of_update) == (5 + 7 + 4 * 17, 2 * 12 + 4 * 17)
    assert [replace(one, m=1, logprobs_of=of).with_n(9).logprobs_of for of in (0, 1, 2)] == [0, 1, 9]
    assert one.in_a_pass(80) == 30 and replace(one, tokens=1).in_a_pass(80) == 24 and one.in_a_pass(9) == 9
    assert replace(one, minibatches=3).tokens_of_update == 5 + 7 + 2 * 17


@pytest.mark.parametrize("word", ["autocast=none", "autocast=bfloat16", "lora.rank=2", "gradient_checkpointing=full"])
def test_passes_are_planned_as_they_allocate(word):
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
def test_more_of_anything_never_takes_less(device):
    base = step(slots=2)
    for steps in (
        [replace(base, tokens=10**6).with_n(n) for n in (2, 3, 8, 60, 400)],
        [step(slots=count) for count in (1, 2, 3, 4)],
        [replace(base.with_n(50), tokens=count) for count in (1, 30, 100, 1000, 3000)],
    ):
        rising = [sum(map(one.bytes_of, one)) for one in (plan(shapes(device), of) for of in steps)]
        assert rising == sorted(rising) and rising[0] < rising[-1]


def test_a_first_pass_has_no_gradients_before_it_goes_back():
    one, more = (planned(tokens=tokens) for tokens in (80, 79))
    assert one["forward"][GRADIENTS] == 0 and more["forward"][GRADIENTS] == 4 * NUMBERS
    assert sum(one["backward"].values()) < sum(more["backward"].values()) and one["optimizer"] == more["optimizer"]


def test_quantised_weights_take_their_bits():
    words = "model.lora.rank=2", "model.dtype=bfloat16", "model.autocast=bfloat16"
    whole, found = (shapes(GPU, *words, *more) for more in ((), ("model.quantize=4bit",)))
    assert whole.weights - found.weights == pytest.approx(LINEAR * (2 - 4 / 8), rel=0.02)
    assert found.gradients == whole.gradients and plan(found, step()).peak < plan(whole, step()).peak


def test_keys_and_copies_of_weights_are_freed_when_a_generation_ends():
    gc.collect()
    gc.disable()
    try:
        assert list(make_engine(small_model()).generate(some_requests()))
        assert not any(type(one) is Generation for one in gc.get_objects())
    finally:
        gc.enable()


RUN = (*WORDS, "n=16")
AUTO = f"{fit.TOKENS}=auto"
MIB = 2**20
LITTLE = 13 * MIB  # takes the weights, the optimizer and a few rows


@cache
def planner(device: torch.device = CPU, *words: str) -> Planner:
    return Planner.of(prepare(settings_of("fit=auto", *RUN, *words)), device)


def chosen(room: int, device: torch.device = CPU, typed: frozenset[str] = frozenset()) -> fit.Fitted:
    return fit.cheapest_fit(planner(device), room, typed)


def tokens_chosen(room: int, *words: str) -> int:
    return int(fit.cheapest_fit(planner(CPU, AUTO, "fit=none", *words), room, set()).values[fit.TOKENS])


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_what_is_chosen_fits_and_is_needed_and_nothing_is_where_there_is_room(device):
    whole = chosen(2**40, device).plan.peak
    assert chosen(2**40, device).values == {} and whole == planner(device).plan().peak
    for share in (0.6, 0.4):
        room = int(share * whole)
        found = chosen(room, device)
        assert found.values and found.plan.peak <= room
        for key in found.values.keys() - {fit.OFFLOAD}:  # of what is recomputed
            without = {key, fit.OFFLOAD} if key == fit.RECOMPUTE else {key}
            less = {name: value for name, value in found.values.items() if name not in without}
            assert planner(device).plan(less).peak > room


def test_what_is_typed_is_not_chosen_but_for_an_automatic_micro_batch():
    room = int(0.6 * chosen(2**40).plan.peak)
    (key, *_) = chosen(room).values
    without = chosen(room, typed=frozenset({key}))
    assert key not in without.values and without.plan.peak <= room
    assert fit.TOKENS in fit.choosable(planner(CPU, AUTO), {fit.TOKENS})
    few = planner(CPU, "collector=partial", "train.prompts=4", "task.train_problems=5").step.rollouts.prompts
    assert len(few) == 5, "a collector requests no more problems than there are"


def test_room_on_a_gpu_is_for_slots_that_nobody_set_and_the_optimizers_state_leaves_it_before_a_run_is_refused():
    for device, more, values in ((GPU, (), {fit.SLOTS: 32}), (GPU, ("sampler.slots=2",), {}), (CPU, (), {})):
        found = fit.cheapest_fit(planner(device, "sampler=infinite", *more), 2**40, set())
        assert found.values == values and ("32" in found.lines[-1]) == (device == GPU)
    for device in (CPU, GPU):
        least, line = chosen(1, device).plan.peak, chosen(1, device).lines[0]
        named = parse_bytes(line.partition("give fit=")[2].partition(",")[0])
        assert least <= fit.within(named, device) and named < 1.02 * max(least / 0.95, least + fit.CPU_RESERVE)
    assert (fit.within(10**10, GPU), fit.within(10**8, CPU)) == (95 * 10**8, 10**8 - 32 * MIB)
    assert chosen(least, GPU).plan.peak <= least < chosen(least, GPU, frozenset({fit.STATE})).plan.peak
    advice, parked = ("".join(breakdown(planner(GPU), way, "optimizer")) for way in ({}, {fit.PARK: True}))
    assert fit.OFFLOAD in fit.cheapest_fit(planner(GPU, f"{fit.RECOMPUTE}=full"), 1, {fit.RECOMPUTE}).values
    assert "optim.offload=true" in advice and "model.dtype=" not in advice and "optim." not in parked


def test_a_micro_batch_is_all_of_a_step_or_the_most_that_fits():
    everything, few = tokens_chosen(2**40), tokens_chosen(LITTLE)
    # 2 prompts of 6 to 16 tokens, each once, and 16 rollouts of each of 12 tokens at most
    assert 6 + 12 < few < everything and 2 * 6 + 32 * 12 <= everything <= 2 * 16 + 32 * 12
    assert few < tokens_chosen(LITTLE, "model.gradient_checkpointing=full")


def test_more_than_there_is_is_refused_and_what_is_free_is_planned_for(monkeypatch):
    monkeypatch.setattr(fit, "free_bytes", lambda device: 100 * MIB)
    said: list[str] = []

    def room(word: str) -> int:
        return fit.room_of(settings_of(*RUN, f"fit={word}"), CPU, 300 * MIB, said.append)

    assert room("1G") == 400 * MIB - fit.CPU_RESERVE and "fit=1G" in said[0] and "400.0 MiB" in said[0]
    assert room("auto") == room("none") == (300 + 90) * MIB and len(said) == 1
    for word in ("1PB", "24"):  # more than there is, and no unit
        with pytest.raises(UserError, match=f"fit={word}.*auto"):
            room(word)


def test_control_groups_around_a_process_bound_what_is_free(tmp_path):
    for group, most in (("a", "5000"), ("a/b", "max"), ("", "100000")):
        folder = tmp_path / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("max", most), ("current", "3000"), ("stat", "anon 2000\ninactive_file 700")):
            (folder / f"memory.{name}").write_text(f"{text}\n")

    def found(path: str) -> list[tuple[int, int]]:
        (tmp_path / "own").write_text(f"7:cpuset:/a\n0::{path}\n")
        return list(memory._control_groups(tmp_path / "own", tmp_path / "cgroup"))

    assert found("/a/b") == [(5000, 2300), (100000, 2300)]
    assert found("/elsewhere/in/a/container") == [(100000, 2300)]
    assert list(memory._control_groups(tmp_path / "none", tmp_path)) == []


def test_a_prefill_holds_of_each_layer_its_keys_and_values_alone():
    """Of 4 more layers 1,024 tokens with a key and a value of 4 numbers each, in float32."""
    peaks = []
    for word in ("model.architecture.num_hidden_layers=4", "model.architecture.num_hidden_layers=8"):
        model = load_model(settings_of(*SMALL, "model.autocast=none", word).model, CPU)
        decoder = Decoder.of(model).prepared()
        with torch.inference_mode(), Allocations(model) as seen:
            decoder.prefill([(3,) * 1024], False)
            peaks.append(sum(seen.take_peak().values()))
    assert peaks[1] - peaks[0] == 4 * 1024 * 2 * 4 * 4


def test_saved_adapters_are_planned_like_new_ones(tmp_path):
    pytest.importorskip("peft")
    load_model(settings_of("model.lora.rank=2").model, CPU).save_pretrained(tmp_path)
    new, saved = (planner(CPU, word).plan() for word in ("model.lora.rank=2", f"model.adapter={tmp_path}"))
    assert new == saved


@pytest.mark.parametrize("word", ["fit=auto", AUTO])
def test_a_resumed_run_goes_on_with_what_was_chosen(word, monkeypatch, tmp_path):
    room = LITTLE if word == AUTO else int(0.7 * chosen(2**40).plan.peak)
    values = {fit.TOKENS: tokens_chosen(room)} if word == AUTO else chosen(room).values
    monkeypatch.setattr(fit, "process_size", lambda device: 0)
    monkeypatch.setattr(fit, "room_of", lambda *given: room)
    begun = done("train", *RUN, "train.steps=2", word, "hydra.run.dir=fitted")
    record = json.loads(Path("fitted/run.json").read_text())
    for key, value in values.items():
        group, name = key.split(".")
        assert record["config"][group][name] == value and f"{key}={value} " in begun
        assert f"{key}={value}" not in record["overrides"]
    monkeypatch.setattr(fit, "cheapest_fit", lambda *given: pytest.fail("a resumed run was planned again"))
    done("train", "resume=fitted", "train.steps=4", "fit=3GB")
    typed = [f"{key}={str(value).lower()}" for key, value in values.items()]
    sampler = ["sampler=infinite"] if fit.SLOTS in values else []
    done("train", *RUN, "train.steps=4", *sampler, *typed, "hydra.run.dir=whole")
    assert rows(Path("fitted")) == rows(Path("whole"))


# `grpo profile`, and runs out of memory


PROFILED = ["train.prompts=1", "n=4", "sampling.max_new_tokens=8", "eval.problems=2", "eval.k=1", "logger=jsonl"]
LAYER = ["model=smollm2_135m", "model.architecture.num_hidden_layers=1", "eval.every=0", "profile.plan_only=true"]


def profile(*words: str, out: str = "out") -> tuple[dict[str, Any], str]:
    shown = done("profile", *PROFILED, f"hydra.run.dir={out}", *words)
    return read_object(Path(out, "profile.json")), shown


def test_a_profile_measures_every_phase_and_predicts_what_training_takes(capsys):
    words = "profile.steps=2 profile.warmup=0 loss.kl_coef=0.1 profile.lengths=full task.train_problems=1"
    found, _ = profile(*words.split())
    phases, predicted = found["measured"]["phases"], found["predicted"]["phases"]
    wanted = {"prefill", "decode", "reward", "ref_logprobs", "forward", "backward", "optimizer", "rest", "step", "eval"}
    assert set(phases) == wanted and set(predicted) == wanted - {"reward", "rest", "step"}
    inside = sum(phases[name]["seconds_median"] for name in wanted - {"step", "eval"})
    assert inside == pytest.approx(phases["step"]["seconds_median"])
    engine = found["measured"]["engine"]
    assert engine["engine/decode_steps"] == 7  # the first of 8 tokens comes from the prompt
    assert phases["decode"]["tokens"] == 2 * 4 * 8
    assert predicted["decode"]["held_by"]["kv"] == engine["engine/kv_peak_bytes"]
    assert all(phases[name]["peak_bytes"] for name in predicted) and found["measured"]["peak"]["phase"] in phases
    show_profiles([("job", Path("out"))])
    assert f"100% {engine['engine/kv_peak_bytes'] / 2**20:.1f} MiB " in " ".join(capsys.readouterr().out.split())


def test_a_plan_reads_no_weights_and_no_problems_of_the_hub_and_runs_nothing(monkeypatch):
    monkeypatch.setattr("grpo_cli.memory.profile.Step", None)
    monkeypatch.setattr("grpo_cli.memory.planner.installed", lambda module: False)
    shape = ["model=qwen2_5_3b", "model.architecture.num_hidden_layers=1", "model.dtype=float32"]
    shape += ["model.lora.rank=2", "model.lora.dropout=0.5"]
    found, _ = profile("profile.plan_only=true", *shape, "fit=2GB", "task=gsm8k")
    assert found["measured"] is None and "256 tokens" in found["not_predicted"][0]
    # Embedding, queries and output, keys and values, the MLP; the rest are vectors.
    numbers = (151_936 + 2 * 2048 + 2 * 256 + 3 * 11_008) * 2048
    assert "old_logprobs" in found["predicted"]["phases"], "dropout needs another pass"
    assert found["predicted"]["phases"]["decode"]["held_by"]["weights"] == pytest.approx(4 * numbers, rel=0.002)
    assert found["fit"]["chosen"][fit.SLOTS] == 1 and found["fit"]["fits"] is False and found["fit"]["largest_n"] == 0


def test_a_profile_plans_for_as_much_of_what_is_free_as_a_run(monkeypatch):
    monkeypatch.setattr(fit, "free_bytes", lambda device: 2 << 30)
    monkeypatch.setattr("grpo_cli.memory.profile.process_size", lambda device: 100 << 20)
    found, _ = profile(*LAYER, "fit=auto")
    assert found["fit"]["room_bytes"] == int(0.9 * (2 << 30)) + (100 << 20)


def test_a_plan_for_a_gpu_has_its_memory_its_precision_and_its_allocators_ways(monkeypatch):
    """Nothing is resident beside the tensors, and 4 bits can be planned for; a T4 has no bfloat16."""
    monkeypatch.setattr("grpo_cli.config.auto.fast_in_bfloat16", lambda device: False)
    words = ["model.lora.rank=2", "model.quantize=4bit", "fit=2GB"]
    words += ["model.gradient_checkpointing=full", "model.offload_activations=true"]
    found, _ = profile("profile.for_gpu=l4", *LAYER, *words)
    assert (found["settings"]["model"]["dtype"], found["settings"]["model"]["autocast"]) == ("bfloat16", "bfloat16")
    held = [phase["held_by"] for phase in found["predicted"]["phases"].values()]
    assert {sizes["workspace"] for sizes in held} == {0} and found["device"] == "l4 of 1.86 GiB"
    found, _ = profile(*LAYER, "profile.for_gpu=t4", out="old")
    assert found["device"] == "t4 of 14.90 GiB" and found["fit"]["room_bytes"] == 16 * 10**9
    assert found["settings"]["model"]["autocast"] == "none" and set(GPUS) == set(get_args(GpuWord))


def test_a_run_out_of_memory_names_phase_breakdown_and_keys(monkeypatch):
    def failing(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr("grpo_cli.learner.forward.packed_hidden", failing)
    said = refused("train", *PROFILED, "train.steps=1", "hydra.run.dir=out", "eval.every=0")
    assert "out of memory in forward (CUDA out of memory. Tried to allocate 20.00 GiB)" in said
    assert "train.micro_batch_tokens" in said and "optimizer" in said
    monkeypatch.setattr("grpo_cli.experiment.evaluate_with", failing)
    said = refused("eval", "eval.problems=1", "hydra.run.dir=exam")
    assert "out of memory in eval" in said and "sampler.slots" in said and not Path("exam").exists()


# As PyTorch 2.13 and CUDA say it: a graph's instantiation, a handle, a convolution, the host.
OUT_OF_MEMORY = (
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory",
)


def test_an_allocation_that_failed_is_known_by_its_kind_its_text_or_what_came_before():
    after = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    assert not any(map(is_out_of_memory, [after, RuntimeError("no"), *map(ValueError, OUT_OF_MEMORY)]))
    after.__context__ = torch.OutOfMemoryError("x")
    assert all(map(is_out_of_memory, [after, MemoryError(), after.__context__, *map(RuntimeError, OUT_OF_MEMORY)]))


@pytest.mark.gpu
def test_a_profile_on_a_gpu_reads_the_allocator_and_agrees_with_its_prediction():
    found, _ = profile("device=cuda", "profile.steps=1", "profile.lengths=full")
    assert found["predicted"]["peak"]["bytes"] == pytest.approx(found["measured"]["peak"]["bytes"], rel=0.2)
