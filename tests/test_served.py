"""The weights and settings that vLLM gets, where vLLM itself is not there or no GPU is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import engine_of, small_model, some_requests

import grpo_cli.engine.vllm_engine as engine_module
from grpo_cli.engine.vllm_served import Served
from grpo_cli.model.anatomy import merged_weights
from grpo_cli.support.errors import UserError


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_weights_are_those_of_a_saved_folder_with_adapters_added_to_what_they_adapt():
    model = small_model()
    found, saved = dict(merged_weights(model)), model.state_dict()
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
    assert not any(weight.requires_grad for weight in found.values())
    peft = pytest.importorskip("peft")
    layers = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["norm"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, use_dora=True, **layers))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
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
    with pytest.raises(UserError, match="heads of 24 numbers, no multiple of 16"):
        Served({}, 24, 24).check_dtype(torch.bfloat16, torch.device("cpu"))


def test_vllm_runs_outside_the_learners_autocast_in_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under it adapters would be merged, and kernels recorded, in bfloat16 twice."""
    monkeypatch.setattr(engine_module, "require", lambda *words: None)
    monkeypatch.setattr(engine_module, "head_sizes", lambda device: None)
    notes, engine = list[Any](), engine_of("vllm", small_model(head_dim=32))

    def note(what: Any) -> None:
        notes.append(what)
        assert not torch.is_autocast_enabled("cpu")

    def started(folder: Any, kwargs: Any) -> Any:
        note(kwargs["dtype"])
        config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=7))
        core = SimpleNamespace(vllm_config=config, engine_core=SimpleNamespace(shutdown=lambda: None))
        calls = dict(collective_rpc=lambda name, kwargs: note(name), reset_prefix_cache=lambda: True)
        return SimpleNamespace(llm_engine=core, **calls)

    monkeypatch.setattr(engine, "_started", started)
    with torch.autocast("cpu", torch.bfloat16):
        engine._wake(some_requests(1, 2))
    assert notes == ["bfloat16", "reload_weights"]
