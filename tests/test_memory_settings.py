"""Settings that save memory: an optimizer whose state is away during rollouts, DoRA and rsLoRA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from small import make_engine, small_model, some_requests
from test_adapters import logits, moved, settings
from test_train import records_of, settings_for, timeless
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_cli.cli.export import export
from grpo_cli.learner.optimizer import make_optimizer, move_state
from grpo_cli.model.adapters import with_adapters
from grpo_cli.model.load import load_model, load_tokenizer, save_pretrained
from grpo_cli.support.errors import UserError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
OPTIM: dict[str, Any] = {"lr": 1e-2, "warmup_steps": 0, "weight_decay": 0.1}


def test_a_run_whose_state_is_parked_is_the_same_to_the_bit(tmp_path: Path) -> None:
    plain, parked = (
        records_of(replace(settings_for(tmp_path / str(park), steps=4), optim=made.optim(**OPTIM, park=park)))
        for park in (False, True)
    )
    assert [timeless(record) for record in plain] == [timeless(record) for record in parked]


def test_on_a_gpu_all_of_it_goes_to_the_host_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors: devices and shapes. What is pinned is asked for, and a fake GPU has none to pin."""
    pinned = list[bool]()
    plain = torch.empty_like

    def empty_like(value: Tensor, *, device: str, pin_memory: bool) -> Tensor:
        pinned.append(pin_memory)
        return plain(value, device=device)

    with FakeTensorMode():
        weights = [torch.zeros(*size, device=GPU, requires_grad=True) for size in ((8, 8), (8,))]
        optimizer = make_optimizer(weights, made.optim(**OPTIM))
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()

        def state() -> tuple[set[str], list[Any]]:
            values = [item for state in optimizer.state.values() for item in state.items()]
            return {value.device.type for _, value in values}, [(key, value.shape) for key, value in values]

        before = state()
        monkeypatch.setattr(torch, "empty_like", empty_like)
        for _ in range(2):  # what is there stays there
            move_state(optimizer, to_host=True)
            assert state() == ({"cpu"}, before[1]) and pinned == [True] * len(before[1])
        move_state(optimizer, to_host=False)
        assert state() == before and before[0] == {"cuda"}


KINDS = [{"dora": True}, {"rslora": True}]


def adapted(**kinds: bool) -> Any:
    return moved(with_adapters(small_model(), settings(lora=made.lora(rank=4, alpha=8.0, **kinds)))).eval()


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "+".join(kinds))
def test_kinds_of_adapters_are_drawn_from_saved_read_and_merged_as_the_learner_has_them(
    tmp_path: Path, kinds: dict[str, bool]
) -> None:
    model = adapted(**kinds)
    for rollout in make_engine(model).generate(some_requests(prompts=2, n=2)):
        start = len(rollout.request.prompt.token_ids)
        row = torch.tensor([[*rollout.request.prompt.token_ids, *rollout.token_ids]])
        with torch.no_grad():
            logs = model(input_ids=row).logits.log_softmax(-1)[0, start - 1 : -1]
        expected = logs.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.sampler_logprobs), expected, atol=2e-5, rtol=0)
    lora = made.lora(rank=4, alpha=8.0, **kinds)
    model = moved(load_model(settings(lora=lora), CPU)).eval()
    found, saved = logits(model), tmp_path / "saved"
    save_pretrained(model, load_tokenizer(made.model("tiny")), saved, with_base=True)
    again = load_model(settings(adapter=str(saved), lora=lora), CPU).eval()
    torch.testing.assert_close(logits(again), found)
    export(saved, str(tmp_path / "merged"), merge=True, base="tiny")
    merged = logits(load_model(made.model(str(tmp_path / "merged")), CPU).eval())
    torch.testing.assert_close(merged, found, atol=1e-4, rtol=0)
    for other in {"dora", "rslora"} - kinds.keys():
        with pytest.raises(UserError, match=f"model.lora.{other}=true"):
            load_model(settings(adapter=str(saved), lora=replace(lora, **{other: True})), CPU)


def test_they_are_what_their_papers_say() -> None:
    """rsLoRA: alpha / sqrt(rank) = 8 / 2, not 8 / 4. DoRA: a row's length is trained, W' = m (W + BA) / |W + BA|."""
    names = "base_model.model.model.layers.0.self_attn.q_proj"
    scale = {kind: adapted(**{kind: True}).get_submodule(names).scaling["default"] for kind in ("dora", "rslora")}
    assert scale == {"dora": 2.0, "rslora": 4.0}
    layer = adapted(dora=True).get_submodule(names)
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    length = layer.lora_magnitude_vector["default"].weight
    assert length.requires_grad
    whole = layer.base_layer.weight + 2.0 * up @ down
    whole = length[:, None] * whole / whole.norm(dim=1, keepdim=True)
    x = torch.randn(3, whole.shape[1], generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.linear(x, whole, layer.base_layer.bias)
    torch.testing.assert_close(layer(x), expected)
