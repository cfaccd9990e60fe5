"""What vLLM is fed with and told, as far as it can be judged without vLLM itself."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made import infinite, micro
from small import engine_of, small_model, some_requests

import grpo_cli.engine.vllm_engine as engine_module
from grpo_cli.engine.sequence import Status
from grpo_cli.engine.vllm_engine import VllmEngine
from grpo_cli.engine.vllm_process import guest
from grpo_cli.engine.vllm_served import Served
from grpo_cli.model.anatomy import merged_weights
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Finish, Request


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("dora", [False, True])
def test_weights_are_those_of_a_saved_folder_with_adapters_added_to_what_they_adapt(dora: bool):
    model = small_model()
    found, saved = dict(merged_weights(model)), model.state_dict()
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
    assert not any(weight.requires_grad for weight in found.values())
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, use_dora=dora, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    merged = {name: weight.clone() for name, weight in merged_weights(adapted)}
    plain = adapted.merge_and_unload().state_dict()
    assert [*merged] == [*found] and all(torch.allclose(merged[name], plain[name], atol=1e-6) for name in found)


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
    assert wide_q.shape == (4 * 32, 32) and wide_q[40:64].count_nonzero() == 0
    assert torch.allclose(wide_q[32:40], 2 * q[8:16])  # sqrt(32 / 8)
    v, wide_v = (x[prefix + "v_proj.bias"] for x in (weights, wide))
    assert torch.equal(wide_v[32:40], v[8:16]) and wide_v.shape == (64,)
    o, wide_o = (x[prefix + "o_proj.weight"] for x in (weights, wide))
    assert torch.equal(wide_o[:, 96:104], o[:, 24:32]) and wide_o.shape == (32, 128)
    for other, sizes in ((model, [4]), (small_model("qwen3"), [32])):
        with pytest.raises(UserError, match="heads of 8 numbers.*use engine=torch"):
            Served.of(other, sizes)


@pytest.mark.parametrize(
    ("dim", "dtype", "device", "fine"),
    [
        (24, torch.float32, "cpu", True),
        (32, torch.bfloat16, "cpu", True),
        (24, torch.bfloat16, "cpu", False),
        (24, torch.bfloat16, "cuda", True),
    ],
)
def test_half_precision_on_a_cpu_needs_heads_that_fill_registers(dim: int, dtype: Any, device: str, fine: bool):
    """vLLM's rotary kernel ends the process otherwise (found with 0.32.0)."""
    with nullcontext() if fine else pytest.raises(UserError, match=f"heads of {dim} numbers in .*float16, only"):
        Served({}, dim, dim).check_dtype(dtype, torch.device(device))


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "require", lambda *words: None)
    monkeypatch.setattr(engine_module, "head_sizes", lambda device: None)


class FakeCore:
    """As much of vLLM's engine as serves requests: each makes these tokens, one a step, and ends with token 1 or at its
    limit. It reports what is new, or all at the end."""

    def __init__(self, tokens: list[int], token_by_token: bool) -> None:
        self._tokens, self._told, self._left = tokens, token_by_token, dict[str, list[int]]()
        self.entered, self.aborted = list[str](), list[str]()

    def enter(self, sequence: Any, token_by_token: bool) -> None:
        assert token_by_token == self._told
        sequence.status = Status.RUNNING
        self._left[str(sequence.index)] = self._tokens[: sequence.limit]
        self.entered.append(str(sequence.index))

    def step(self) -> list[Any]:
        outputs = []
        for name, left in list(self._left.items()):
            tokens = left if not self._told else left[:1]
            rest = left[len(tokens) :]
            made = SimpleNamespace(token_ids=tokens, logprobs=SimpleNamespace(logprobs=[-0.5] * len(tokens)))
            outputs.append(SimpleNamespace(request_id=name, outputs=[made], num_cached_tokens=2, finished=not rest))
            self._left[name] = rest
            if not rest:
                del self._left[name]
        return outputs

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            self._left.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return True


def serving(core: FakeCore, **parts: Any) -> VllmEngine:
    engine: VllmEngine = engine_of("vllm", small_model(), **parts)
    engine._llm, engine._slots, engine._enter = SimpleNamespace(llm_engine=core), 2, core.enter  # type: ignore[method-assign]
    engine._wake, engine._limit = lambda requests: 0.0, lambda: 999  # type: ignore[method-assign]
    return engine


def stopping(request: Request, tokens: int, stop: str) -> Request:
    return replace(request, sampling=replace(Sampling.plain(tokens), stop=(stop,)))


@pytest.mark.parametrize(("sampler", "steps"), [(infinite(slots=2), 5), (micro(slots=2), 6)])
def test_a_slot_is_refilled_or_waits_for_its_round(sampler: Any, steps: int) -> None:
    """Five of one prompt in two slots; the second and the fourth end after a token, the others after two."""
    requests = [stopping(one, 1 if place in (1, 3) else 9, "x") for place, one in enumerate(some_requests(1, 5))]
    engine = serving(FakeCore([5, 1], token_by_token=True), sampler=sampler, decode=lambda ids: "")
    rollouts = {one.request.sample: one for one in engine.generate(requests)}
    assert [len(rollouts[i]) for i in range(5)] == [2, 1, 2, 1, 2]
    assert [rollouts[i].finish for i in (0, 1)] == [Finish.EOS, Finish.LENGTH]
    stats, prompt = engine.stats(), len(requests[0].prompt.token_ids)
    assert (stats.decode_steps, stats.generated_tokens, stats.prefill_tokens) == (steps, 8, 5 * (prompt - 2))
    assert stats.slot_utilisation == pytest.approx(8 / (2 * steps))


def test_a_stop_string_ends_a_rollout_and_enough_the_others() -> None:
    core = FakeCore([5, 6, 7, 8], token_by_token=True)
    engine = serving(core, decode=lambda ids: "".join(chr(97 + i) for i in ids))
    requests = [stopping(one, 9, stop) for one, stop in zip(some_requests(1, 3), "gzz", strict=True)]
    first, *others = engine.generate(requests, lambda rollout: True)
    assert (first.token_ids, first.finish) == ((5, 6), Finish.STOP)
    assert {(one.token_ids, one.finish) for one in others} == {((5, 6), Finish.PARTIAL), ((), Finish.PARTIAL)}
    assert set(core.aborted) == {"0", "1"} and core.entered == ["0", "1"]


def test_what_nothing_depends_on_before_its_end_is_reported_then_and_a_closed_iterator_aborts_the_rest() -> None:
    core = FakeCore([5, 6, 1], token_by_token=False)
    rollouts = serving(core, sampler=infinite(slots=2)).generate(some_requests(1, 3, temperature=0.0))
    assert [one.sampler_logprobs for one in rollouts] == [(0.0,) * 3] * 3, "greedy tokens are those of a point mass"
    core, requests = FakeCore([5, 6, 7, 8], token_by_token=True), some_requests(1, 2)
    letters = serving(core, decode=lambda ids: "".join(chr(97 + i) for i in ids))
    rollouts = letters.generate([stopping(one, 9, stop) for one, stop in zip(requests, "gz", strict=True)])
    assert next(rollouts).token_ids == (5, 6)
    rollouts.close()  # type: ignore[attr-defined]
    assert core.aborted == ["0", "1"]


# A GPU's memory


class FakeVllm:
    """As much of vLLM as is told of memory: notes what it is started with and told to do."""

    def __init__(self, notes: list[Any]) -> None:
        config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=7))
        self.llm_engine = SimpleNamespace(vllm_config=config, engine_core=SimpleNamespace(shutdown=lambda: None))
        self.wake_up = lambda tags: notes.append(tags)
        self.collective_rpc = lambda name, kwargs: notes.append(name)
        self.reset_prefix_cache = lambda: True


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, free: int, notes: list[Any], **words: Any) -> VllmEngine:
    """The engine as on a GPU of 100 GiB, of which so many are free when it starts."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 100 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * 2**30)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: notes.append("empty_cache"))
    engine: VllmEngine = engine_of("vllm", small_model(), warn=notes.append, **words)
    engine._device, engine._sleeps = torch.device("cuda"), True

    def started(folder: Any, kwargs: Any) -> Any:
        notes.append(kwargs)
        return FakeVllm(notes)

    monkeypatch.setattr(engine, "_started", started)
    return engine


@pytest.mark.parametrize("words", [{}, {"sampler": infinite(kv_budget="1GiB")}], ids=["", "budget"])
@pytest.mark.filterwarnings("ignore:User provided device_type")
def test_vllm_takes_what_is_free_where_the_policy_is_there_already(
    monkeypatch: pytest.MonkeyPatch, words: dict[str, Any]
):
    """It does not start where its share of the whole card is not free."""
    for free, share in ((80, 0.4), (30, 0.295)):  # half a GiB is left
        notes: list[Any] = []
        on_a_gpu(monkeypatch, free, notes, memory=0.4, **words)._build(some_requests(1, 2))
        cleared, *warned, kwargs = notes
        assert cleared == "empty_cache" and kwargs["gpu_memory_utilization"] == pytest.approx(share)
        assert ("kv_cache_memory_bytes" in kwargs) == ("sampler" in words)
        assert ["engine.memory=0.4" in text for text in warned] == [True] * (free == 30)
    with pytest.raises(UserError, match="engine=vllm cannot start"):
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


def test_a_guest_leaves_the_random_states_of_gpus_as_they_were(monkeypatch: pytest.MonkeyPatch):
    """Dropout of adapters draws from them: with vLLM it would be another after its start than without."""
    states = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states[device].copy_(state))
    here = torch.get_rng_state()
    with guest():
        states[1] += 7
        torch.rand(1)
    assert [state.tolist() for state in states] == [[1, 2], [3, 4]] and torch.equal(torch.get_rng_state(), here)
