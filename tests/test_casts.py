"""Rollouts under autocast multiply by weights that are cast once, when they begin, and say what autocast would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import adapted_model, contents, make_engine, small_model, some_requests
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_cli.engine import layers
from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.layers import Each, Weights
from grpo_cli.support.memory import storages, tensors_of


class Casts(TorchDispatchMode):
    """Counts the weights that are cast: of one shape with a parameter, from float32 to bfloat16."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.addresses, self.count = {weight.data_ptr() for weight in model.parameters()}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.addresses:
            self.count += out.dtype == torch.bfloat16
        return out


@pytest.mark.parametrize("adapted", [False, True])
def test_a_decode_step_casts_no_weight(adapted: bool) -> None:
    model = adapted_model() if adapted else small_model()
    counts = []
    for tokens in (4, 12):
        engine = make_engine(model, eos_token_ids=(10**6,))
        with torch.autocast("cpu", torch.bfloat16), Casts(model) as casts:
            rollouts = list(engine.generate(some_requests(prompts=1, n=2, tokens=tokens)))
        assert [len(rollout.token_ids) for rollout in rollouts] == [tokens, tokens]
        counts.append(casts.count)
    assert counts[0] == counts[1] > 0, "each weight once, however many steps there are"


@pytest.mark.parametrize("adapted", [False, True])
def test_weights_that_are_cast_once_say_what_autocast_says(adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = adapted_model() if adapted else small_model(), some_requests(prompts=2, n=3)
    with torch.autocast("cpu", torch.bfloat16):
        once = contents(make_engine(model).generate(requests))
        monkeypatch.setattr(Weights, "of", lambda self, layer: layer)
        monkeypatch.setattr(Weights, "together", lambda self, *layers: Each(layers))
        assert contents(make_engine(model).generate(requests)) == once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_multiplied_as_they_are_are_not_copied(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model().to(dtype)
    of_model, decoder = storages(model.parameters()), Decoder.of(model)
    for packed_from, copied in ((layers.PACKED_FROM, True), (0, False)):
        monkeypatch.setattr(layers, "PACKED_FROM", packed_from)
        # queries, keys and values of one product, gates with their activations of another; all else is referred to
        blocks = decoder.prepared().blocks
        found = {tensor.untyped_storage()._cdata in of_model for tensor in tensors_of([*blocks])}
        assert found == ({True, False} if copied else {True})
