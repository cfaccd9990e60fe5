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
from grpo_cli.engine.vllm_served import Served
from grpo_cli.model.anatomy import merged_weights
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Finish, Request


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_weights_are_those_of_a_saved_folder_with_adapters_added_to_what_they_adapt():
    model = small_model()
    found, saved = dict(merged_weights(model)), model.state_dict()
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
    assert not any(weight.requires_grad for weight in found.values())
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "down_proj"]))
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
    # vLLM's rotary kernel for CPUs ends the process for these (found with 0.32.0).
    Served({}, 24, 24).check_dtype(torch.bfloat16, torch.device("cuda"))
    with pytest.raises(UserError, match="heads of 24 numbers in bfloat16, only"):
        Served({}, 24, 24).check_dtype(torch.bfloat16, torch.device("cpu"))


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "require", lambda *words: None)
    monkeypatch.setattr(engine_module, "head_sizes", lambda device: None)


class FakeCore:
    """As much of vLLM's engine as serves requests: each makes these tokens, one a step, and ends with token 1 or at its
    limit. It reports what is new, or all at the end."""

    def __init__(self, *tokens: int, token_by_token: bool = True) -> None:
        self._tokens, self._told, self._left = tokens, token_by_token, dict[str, tuple[int, ...]]()
        self.entered, self.aborted = list[str](), list[str]()

    def enter(self, sequence: Any, token_by_token: bool) -> None:
        assert token_by_token == self._told
        sequence.status = Status.RUNNING
        self._left[str(sequence.index)] = self._tokens[: sequence.limit]
        self.entered.append(str(sequence.index))

    def step(self) -> list[Any]:
        outputs = []
        for name in list(self._left):
            left = self._left.pop(name)
            tokens, rest = (left[:1], left[1:]) if self._told else (left, ())
            made = SimpleNamespace(token_ids=tokens, logprobs=SimpleNamespace(logprobs=[-0.5] * len(tokens)))
            outputs.append(SimpleNamespace(request_id=name, outputs=[made], num_cached_tokens=2, finished=not rest))
            self._left |= {name: rest} if rest else {}
        return outputs

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            self._left.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return True


def serving(core: FakeCore, **parts: Any) -> VllmEngine:
    parts = {"decode": lambda ids: "".join(chr(97 + i) for i in ids)} | parts
    engine: VllmEngine = engine_of("vllm", small_model(), **parts)
    engine._llm, engine._slots, engine._enter = SimpleNamespace(llm_engine=core), 2, core.enter  # type: ignore[method-assign]
    engine._wake, engine._limit = lambda requests: 0.0, lambda: 999  # type: ignore[method-assign]
    return engine


def stopping(tokens: int, *stops: str) -> list[Request]:
    """Requests of one prompt with a stop string each."""
    words = [replace(Sampling.plain(tokens), stop=(stop,)) for stop in stops]
    return [replace(one, sampling=word) for one, word in zip(some_requests(1, len(stops)), words, strict=True)]


@pytest.mark.parametrize(("sampler", "steps"), [(infinite(slots=2), 5), (micro(slots=2), 6)])
def test_a_slot_is_refilled_or_waits_for_its_round(sampler: Any, steps: int) -> None:
    """Five of one prompt in two slots; the second and the fourth end after a token, the others after two."""
    requests = [stopping(1 if place in (1, 3) else 9, *"zzzzz")[place] for place in range(5)]
    engine = serving(FakeCore(5, 1), sampler=sampler)
    rollouts = {one.request.sample: one for one in engine.generate(requests)}
    assert [len(rollouts[i]) for i in range(5)] == [2, 1, 2, 1, 2]
    assert [rollouts[i].finish for i in (0, 1)] == [Finish.EOS, Finish.LENGTH]
    stats, prompt = engine.stats(), len(requests[0].prompt.token_ids)
    assert (stats.decode_steps, stats.generated_tokens, stats.prefill_tokens) == (steps, 8, 5 * (prompt - 2))
    assert stats.slot_utilisation == pytest.approx(8 / (2 * steps))


def test_a_stop_string_ends_a_rollout_and_enough_or_a_closed_iterator_the_others() -> None:
    core = FakeCore(5, 6, 7, 8)
    first, *others = serving(core).generate(stopping(9, *"gzz"), lambda rollout: True)
    assert (first.token_ids, first.finish) == ((5, 6), Finish.STOP)
    assert {(one.token_ids, one.finish) for one in others} == {((5, 6), Finish.PARTIAL), ((), Finish.PARTIAL)}
    assert set(core.aborted) == {"0", "1"} and core.entered == ["0", "1"]
    core = FakeCore(5, 6, 7, 8)
    rollouts: Any = serving(core).generate(stopping(9, *"gz"))
    assert next(rollouts).token_ids == (5, 6)
    rollouts.close()
    assert core.aborted == ["0", "1"]
    core = FakeCore(5, 6, 1, token_by_token=False)  # where nothing depends on a token before the end
    rollouts = serving(core, sampler=infinite(slots=2)).generate(some_requests(1, 3, temperature=0.0))
    assert [one.sampler_logprobs for one in rollouts] == [(0.0,) * 3] * 3, "greedy tokens are those of a point mass"


# Memory and precision


def starting(monkeypatch: pytest.MonkeyPatch, notes: list[Any], **words: Any) -> VllmEngine:
    """An engine that notes what vLLM is started with and told to do, which it never is under autocast."""

    def note(what: Any) -> None:
        notes.append(what)
        assert not torch.is_autocast_enabled("cpu")

    def started(folder: Any, kwargs: Any) -> Any:
        note(kwargs)
        config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=7))
        core = SimpleNamespace(vllm_config=config, engine_core=SimpleNamespace(shutdown=lambda: None))
        calls = dict(wake_up=lambda tags: note(tags), collective_rpc=lambda name, kwargs: note(name))
        return SimpleNamespace(llm_engine=core, reset_prefix_cache=lambda: True, **calls)

    engine: VllmEngine = engine_of("vllm", small_model(head_dim=32), warn=notes.append, **words)
    monkeypatch.setattr(engine, "_started", started)
    return engine


def test_vllm_runs_outside_the_learners_autocast_in_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[Any] = []
    with torch.autocast("cpu", torch.bfloat16):
        starting(monkeypatch, notes)._wake(some_requests(1, 2))
    assert notes[0]["dtype"] == "bfloat16" and notes[1:] == ["reload_weights"]


@pytest.mark.parametrize("words", [{}, {"sampler": infinite(kv_budget="1GiB")}], ids=["", "budget"])
@pytest.mark.filterwarnings("ignore:User provided device_type")
def test_vllm_takes_what_is_free_on_a_gpu_where_the_policy_is_already(
    monkeypatch: pytest.MonkeyPatch, words: dict[str, Any]
) -> None:
    """Of 100 GiB. It does not start where its share of the whole card is not free; and the policy gives back what it
    keeps before vLLM wakes."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * 2**30)
    requests = some_requests(1, 2)
    for free, share in ((80, 0.4), (30, 0.295), (0, 0.0)):  # half a GiB is left
        notes: list[Any] = []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * 2**30, 100 * 2**30))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda notes=notes: notes.append("empty_cache"))
        engine = starting(monkeypatch, notes, memory=0.4, **words)
        engine._device, engine._sleeps = torch.device("cuda"), True
        with nullcontext() if free else pytest.raises(UserError, match="engine=vllm cannot start"):
            engine._wake(requests)
            cleared, *warned, kwargs, told = notes
            assert (cleared, told) == ("empty_cache", "reload_weights")
            assert kwargs["gpu_memory_utilization"] == pytest.approx(share)
            assert ("kv_cache_memory_bytes" in kwargs) == ("sampler" in words)
            assert ["engine.memory=0.4" in text for text in warned] == [True] * (free == 30)
            notes.clear()
            engine._asleep = engine._stale = True
            engine._wake(requests)
            assert notes == ["empty_cache", ["weights"], "reload_weights", ["kv_cache"]]
