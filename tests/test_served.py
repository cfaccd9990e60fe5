"""What vLLM is fed with and told, as far as it can be judged without vLLM itself."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_cli.engine.vllm.admission import Work
from made import infinite
from small import small_model, some_requests, vllm_engine

import grpo_cli.engine.vllm.engine as engine_module
from grpo_cli.engine.order.schedule import Fifo
from grpo_cli.engine.vllm.engine import VllmEngine
from grpo_cli.engine.vllm.process import guest
from grpo_cli.engine.vllm.served import Served
from grpo_cli.model.weights import merged_weights
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Finish, Prompt, Request, Rollout


def test_weights_are_those_of_a_saved_folder():
    model = small_model()
    found, saved = dict(merged_weights(model)), model.state_dict()
    assert found.keys() == saved.keys()
    assert all(found[name] is saved[name] or torch.equal(found[name], saved[name]) for name in saved)
    assert not any(weight.requires_grad for weight in found.values())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_adapters_are_added_to_what_they_adapt():
    peft = pytest.importorskip("peft")
    model = small_model()
    names = list(model.state_dict())
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    found = {name: weight.clone() for name, weight in merged_weights(adapted)}
    assert list(found) == names
    plain = adapted.merge_and_unload().state_dict()
    assert all(torch.allclose(found[name], plain[name], atol=1e-6) for name in names)


def test_larger_heads_are_zero_where_the_models_have_nothing():
    model = small_model()  # 4 heads of 8 for queries, 2 for keys and values
    served = Served.of(model, [32, 64])
    assert served.served_dim == 32
    assert served.config["architectures"] == ["LlamaForCausalLM"]
    assert served.config["qkv_bias"] and not served.config["attention_bias"]
    assert int(32 * served.config["rope_parameters"]["partial_rotary_factor"]) == 8
    weights, wide = dict(merged_weights(model)), dict(served.weights(merged_weights(model)))
    prefix = "model.layers.0.self_attn."
    q, wide_q = (x[prefix + "q_proj.weight"] for x in (weights, wide))
    assert wide_q.shape == (4 * 32, 32)
    assert torch.allclose(wide_q[32:40], 2 * q[8:16])  # sqrt(32 / 8)
    assert wide_q[40:64].count_nonzero() == 0
    v, wide_v = (x[prefix + "v_proj.bias"] for x in (weights, wide))
    assert torch.equal(wide_v[32:40], v[8:16]) and wide_v.shape == (64,)
    o, wide_o = (x[prefix + "o_proj.weight"] for x in (weights, wide))
    assert torch.equal(wide_o[:, 96:104], o[:, 24:32]) and wide_o.shape == (32, 128)
    assert wide["model.norm.weight"] is not None


@pytest.mark.parametrize("dim", [8, 24, 40, 72, 120])
def test_the_rotated_part_is_the_models_own_for_every_pair_of_sizes(dim: int):
    """vLLM takes the whole part of size times factor."""
    model = small_model()
    model.model.layers[0].self_attn.head_dim = dim
    for larger in (128, 160, 176, 256, *(size for size in (32, 64, 80, 96, 112) if size > dim)):
        config = Served.of(model, [larger]).config
        assert int(larger * config["rope_parameters"]["partial_rotary_factor"]) == dim


def test_heads_that_no_kernel_takes_are_refused():
    with pytest.raises(UserError, match="heads of 8 numbers here: its kernels take 4, and none of them is larger"):
        Served.of(small_model(), [4])


@pytest.mark.parametrize(
    ("dim", "dtype", "device", "fine"),
    [
        (24, torch.float32, "cpu", True),
        (32, torch.bfloat16, "cpu", True),
        (24, torch.bfloat16, "cpu", False),
        (24, torch.float16, "cpu", False),
        (24, torch.bfloat16, "cuda", True),
    ],
)
def test_half_precision_on_a_cpu_needs_heads_that_fill_registers(dim: int, dtype: Any, device: str, fine: bool):
    """vLLM's rotary kernel ends the process otherwise (found with 0.32.0)."""
    with nullcontext() if fine else pytest.raises(UserError, match=f"heads of {dim} numbers in .*float16, only"):
        Served({}, dim, dim).check_dtype(dtype, torch.device(device))


class Output:
    """What vLLM gives for a finished request: this one made two tokens, the last of them `last`."""

    num_cached_tokens = 0

    def __init__(self, index: int, last: int) -> None:
        self.request_id = str(index)
        self.outputs = [self]
        self.token_ids, self.finish_reason = [5, last], "stop"
        self.logprobs: Any = type("Flat", (), {"logprobs": [-0.5, -0.25]})()


def work(refills: bool) -> Work:
    prompt = Prompt("p", (2, 3, 4), "")
    made = Work([Request(prompt, i, i, Sampling.plain(2)) for i in range(5)], 2, refills)
    made.start(Fifo(), None)
    return made


def test_continuous_work_refills_a_slot_and_rounds_wait():
    continuous, rounds = work(True), work(False)
    for made in (continuous, rounds):
        assert made.admitted(started(made)) == [0, 1]
        made.count_step()
        rollout = ended(made, Output(1, 1))
        assert (rollout.finish, rollout.kept_kv) == (Finish.EOS, 1)
    assert continuous.admitted(started(continuous)) == [2]
    assert rounds.admitted(started(rounds)) == []
    assert ended(rounds, Output(0, 7)).finish is Finish.LENGTH
    assert rounds.admitted(started(rounds)) == [2, 3]
    stats = rounds.stats(1000, {})
    assert (stats.decode_steps, stats.generated_tokens, stats.prefill_tokens, stats.slot_utilisation) == (1, 4, 6, 1.0)


def test_cached_prompts_greedy_rows_and_idle_slots_are_counted_as_they_are():
    prompt = Prompt("p", (2, 3, 4), "")
    made = Work([Request(prompt, 0, 0, Sampling.plain(2, temperature=0.0))], 4, True)
    made.start(Fifo(), None)
    assert made.admitted(started(made)) == [0]
    made.count_step()
    output = Output(0, 1)
    output.num_cached_tokens = 2
    assert ended(made, output).sampler_logprobs == (0.0, 0.0), "a greedy row draws from a point mass"
    stats = made.stats(1000, {})
    assert (stats.prefill_tokens, stats.slots, stats.slot_utilisation) == (1, 4, 0.25)


def ended(made: Work, output: Output) -> Rollout:
    made.note(output)
    return made.settle(output, (1,))


def started(made: Work) -> Fifo:
    scheduler = Fifo()
    scheduler.start(tuple(made.queue.values()), 2)
    return scheduler


class FakeVllm:
    """As much of vLLM as is told of memory: notes what it is started with and told to do, and by which runner."""

    def __init__(self, notes: list[Any], v2: bool) -> None:
        cache = SimpleNamespace(num_gpu_blocks=7)
        config = SimpleNamespace(cache_config=cache, use_v2_model_runner=v2)
        core = SimpleNamespace(shutdown=lambda: None)
        self.llm_engine = SimpleNamespace(vllm_config=config, engine_core=core)
        self.wake_up = lambda tags: notes.append(tags)
        self.collective_rpc = lambda name, kwargs: notes.append(name)
        self.reset_prefix_cache = lambda: True


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, free: int, notes: list[Any], v2: bool = True, **words: Any) -> VllmEngine:
    """The engine as on a GPU of 100 GiB, of which so many are free when it starts."""
    monkeypatch.setattr(engine_module, "require_vllm", lambda: None)
    monkeypatch.setattr(engine_module, "head_sizes", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 100 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * 2**30)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: notes.append("empty_cache"))
    engine = vllm_engine(small_model(), warn=notes.append, **words)
    engine._device, engine._sleeps = torch.device("cuda"), True

    def started(folder: Any, kwargs: Any) -> Any:
        notes.append(kwargs)
        return FakeVllm(notes, v2)

    monkeypatch.setattr(engine, "_started", started)
    return engine


@pytest.mark.parametrize("words", [{}, {"sampler": infinite(kv_budget="1GiB")}], ids=["", "budget"])
@pytest.mark.filterwarnings("ignore:User provided device_type")
def test_vllm_is_told_to_take_what_is_free_where_the_policy_is_there_already(
    monkeypatch: pytest.MonkeyPatch, words: dict[str, Any]
):
    """It does not start where its share of the whole card is not free."""
    for free, share in ((80, 0.4), (30, 0.295)):  # half a GiB is left
        notes: list[Any] = []
        on_a_gpu(monkeypatch, free, notes, memory=0.4, **words)._build(some_requests(1, 2))
        emptied, *warned, kwargs = notes
        assert emptied == "empty_cache" and kwargs["gpu_memory_utilization"] == pytest.approx(share)
        assert ("kv_cache_memory_bytes" in kwargs) == ("sampler" in words)
        assert [text for text in warned if "engine.memory=0.4" in text] == warned and len(warned) == (free == 30)
    with pytest.raises(UserError, match="engine=vllm cannot start: .* are free"):
        on_a_gpu(monkeypatch, 0, [])._build(some_requests(1, 2))


@pytest.mark.filterwarnings("ignore:User provided device_type")
def test_the_policy_gives_back_what_it_keeps_before_vllm_wakes(monkeypatch: pytest.MonkeyPatch):
    notes: list[Any] = []
    engine = on_a_gpu(monkeypatch, 80, notes)
    engine._wake(some_requests(1, 2))
    notes.clear()
    engine._asleep = engine._stale = True
    engine._wake(some_requests(1, 2))
    assert notes == ["empty_cache", ["weights"], "reload_weights", ["kv_cache"]]


@pytest.mark.filterwarnings("ignore:User provided device_type")
@pytest.mark.parametrize("v2", [True, False])
def test_the_runner_is_named(monkeypatch: pytest.MonkeyPatch, v2: bool):
    notes: list[Any] = []
    engine = on_a_gpu(monkeypatch, 80, notes, v2)
    assert engine.facts()["model_runner"] is None
    engine._build(some_requests(1, 2))
    assert engine.facts()["model_runner"] == ("V2" if v2 else "V1")
    assert any("older runner" in str(note) for note in notes) != v2


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_that_grow_are_refused_where_vllm_sleeps(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(UserError, match=f"{name}=max.*True in the environment: vLLM sleeps by.*engine.sleep=false"):
        vllm_engine(small_model(), sleep=True)


def test_a_guest_leaves_the_random_states_of_gpus_as_they_were(monkeypatch: pytest.MonkeyPatch):
    """Dropout of adapters draws from them: with vLLM it would be another after its start than without."""
    states, kept = [torch.tensor([1, 2])], list[Any]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone() for state in states])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", kept.extend)
    with guest():
        states[0] += 7
    assert [state.tolist() for state in kept] == [[1, 2]]
