"""What is kept for the backward pass is little, and the gradients have the bits that they have where all is kept."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import made
import pytest
import torch
from small import VOCABULARY, small_model
from torch import Tensor

from grpo_cli.learner.logprobs import token_logprobs
from grpo_cli.memory.allocations import ACTIVATIONS, Allocations
from grpo_cli.model import mlp_recompute as lean
from grpo_cli.model.adapters import with_adapters
from grpo_cli.model.packed import Tree, allow_packing, packed_hidden
from grpo_cli.support import memory

IDS = torch.randint(2, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(3, 20, dtype=torch.bool).tril(12).logical_and(torch.arange(20) > 4)


@pytest.fixture(autouse=True)
def no_memory_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean, "is_little", lambda nbytes: False)


class KeepAll(lean._Hooks):
    """What autograd does by itself."""

    def pack(self, tensor: Tensor) -> Tensor:
        return tensor


def adapted(**settings: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = with_adapters(small_model("llama"), replace(made.model(), lora=made.lora(**settings)))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    return model


def gradients(model: Any, autocast: bool) -> dict[str, Tensor]:
    model.zero_grad()
    precision = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    torch.manual_seed(1)  # of dropout
    with precision:
        values = token_logprobs(model.train(), IDS, MASK, 0.7, 8)
    (values * torch.arange(20)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: small_model("llama"),
        lambda: small_model("qwen3"),
        lambda: small_model("qwen2").to(torch.bfloat16),
        lambda: adapted(rank=2),
        lambda: adapted(rank=2, dropout=0.5),
    ],
    ids=["llama", "qwen3", "bfloat16", "lora", "dropout"],
)
def test_gradients_have_the_same_bits(make: Any, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    little = gradients(make(), autocast)
    monkeypatch.setattr(lean, "_Hooks", KeepAll)
    everything = gradients(make(), autocast)
    assert little.keys() == everything.keys() and any(g.any() for g in little.values())
    assert all(torch.equal(little[name], everything[name]) for name in little)


def kept(model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that are kept of a pass, but for weights and what has no gradient."""
    storages: dict[int, Tensor] = {}

    class Watched(lean._Hooks):
        def pack(self, tensor: Tensor) -> Any:
            packed = super().pack(tensor)
            if isinstance(packed, lean._Kept):
                storages[packed.tensor.untyped_storage()._cdata] = packed.tensor
            return packed

    monkeypatch.setattr(lean, "_Hooks", Watched)
    states = lean.last_states(model, input_ids=ids)
    assert states.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def test_only_what_products_make_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a token, in a layer: the two residuals (32 each), what q, k, v, gate and up give (32 + 16 + 16 + 64 + 64) and
    # attention (32); the norms' factors (2). After the last layer a residual and a factor.
    numbers = 2 * (2 * 32 + 32 + 16 + 16 + 64 + 64 + 32 + 2) + 32 + 1
    assert kept(small_model("llama"), IDS, monkeypatch) == IDS.numel() * numbers * 4


def test_autocast_keeps_no_copies_of_the_weights() -> None:
    model = small_model("llama", hidden_size=256, intermediate_size=1024)
    with torch.autocast("cpu", torch.bfloat16), Allocations(model) as allocations:
        states = lean.last_states(model, input_ids=IDS[:1, :1])
        allocations.take_peak()
        assert allocations.take_peak()[ACTIVATIONS] < 10**5 < sum(p.nbytes // 2 for p in model.parameters())
    del states


def test_a_float32_copy_of_a_bfloat16_residual_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = 2 * (2 * 32 + 32 + 16 + 16 + 64 + 64 + 32) + 32
    factors = 4 * (2 * 2 + 1)  # these alone are in float32
    model = small_model("llama").to(torch.bfloat16)
    assert kept(model, IDS, monkeypatch) == IDS.numel() * (numbers * 2 + factors)


@pytest.mark.parametrize("backward", [False, True])
def test_a_pass_is_forgotten_with_its_result(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note of a node that is kept by that node would stay for ever, and so would all that came before."""
    seen: list[weakref.ref[Any]] = []

    class Watched(lean._Hooks):
        def pack(self, tensor: Tensor) -> Any:
            if tensor.grad_fn is not None:
                seen.append(weakref.ref(tensor.untyped_storage()))
            return super().pack(tensor)

    monkeypatch.setattr(lean, "_Hooks", Watched)
    model = small_model("llama")
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    states = lean.last_states(model, input_ids=IDS)
    if backward:
        states.sum().backward()
    gc.disable()
    try:
        del states
        left = [storage() for storage in seen]
    finally:
        gc.enable()
    assert len(seen) > 50 and all(storage is None or storage._cdata in weights for storage in left)


def test_packed_rows_keep_little_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama")
    allow_packing(model)
    found = []
    for hooks in (lean._Hooks, KeepAll):
        monkeypatch.setattr(lean, "_Hooks", hooks)
        model.zero_grad()
        packed_hidden(model, IDS.flatten(), [Tree(10, (20, 30))]).sum().backward()
        found.append([p.grad for p in model.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_is_little_depends_on_the_machine_and_on_what_the_user_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_host_bytes", lambda: 3200)
    monkeypatch.setattr(memory, "_room", None)
    assert memory.is_little(100) and not memory.is_little(101)
    memory.keep_freed(320)
    assert memory.is_little(10) and not memory.is_little(11)


@pytest.mark.parametrize("room", [289 * 60 * 4 * 2, 10**9])
def test_a_pass_that_is_small_for_this_machine_stores_everything(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[lean._Hooks] = []
    hooks = lean._Hooks
    monkeypatch.setattr(lean, "_Hooks", lambda: made.append(hooks()) or made[-1])
    monkeypatch.setattr(lean, "is_little", lambda nbytes: nbytes <= room)
    with Allocations(model := small_model("llama")) as allocations:
        states = lean.last_states(model, input_ids=IDS)
        stored = allocations.take_peak()[ACTIVATIONS]
    assert len(made) == (room < 10**9)
    # by its own estimate of what it would store, which is near what it does
    assert made or stored == pytest.approx(lean.stored_bytes(model.config, IDS.numel()), rel=0.25)
    del states


def test_what_is_freed_goes_back_all_along_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a layer 290 numbers of a token are kept (above), some of them by more than one operation.
    model, calls = small_model("llama", num_hidden_layers=8), []
    monkeypatch.setattr(lean, "give_back_freed", lambda: calls.append(1))
    monkeypatch.setattr(lean, "_AT_MOST_FREED", IDS.numel() * 288 * 4)
    states = lean.last_states(model, input_ids=IDS)
    forward = len(calls)
    states.sum().backward()
    assert forward >= 8 and len(calls) - forward >= 8
