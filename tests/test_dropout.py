"""Dropout of adapters is at work in updates alone: not in rollouts, not in evaluation, not in what is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import made
import pytest
import torch
from test_adapters import moved
from test_learner import make_batch, make_learner
from test_model_runs import trainer
from torch import nn

from grpo_cli.model.load import load_model
from grpo_cli.settings import LoraSettings

pytest.importorskip("peft")
DROPPING = LoraSettings(rank=2, alpha=4.0, dropout=0.5, targets=("q_proj",), dora=False, rslora=False)
VETOED = ("correction.importance=token", "correction.is_threshold=2", "correction.rejection=veto")


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_loaded_model_says_the_same_twice_and_an_update_recomputes_where_that_was_asked_for(
    checkpointing: str,
) -> None:
    """In train mode, which gradient checkpointing asks for, it would not say the same."""
    tiny = replace(made.model(), lora=DROPPING, gradient_checkpointing=checkpointing)
    model = moved(load_model(tiny, torch.device("cpu")))
    assert not any(module.training for module in model.modules())
    ids, calls = torch.arange(2, 12)[None], list[bool]()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
        assert not torch.equal(model.train()(input_ids=ids).logits, model(input_ids=ids).logits)
    layer: nn.Module = model.get_base_model().model.layers[0].mlp
    layer.register_forward_pre_hook(lambda module, _: calls.append(module.training))
    make_learner(model.eval()).update(make_batch(), 0)
    assert calls == [True] * (1 + (checkpointing == "full"))


@pytest.mark.parametrize(("dropout", "correction"), [(0, ()), (0.5, ()), (0.5, VETOED)], ids=str)
def test_dropout_costs_a_pass_of_its_own_and_is_no_mismatch_and_clips_nothing(
    dropout: float, correction: tuple[str, ...], tmp_path: Path
) -> None:
    """The old policy of an update whose learner has not moved yet is the learner itself, dropout included."""
    words = ("model.lora.rank=2", f"model.lora.dropout={dropout}", "optim.lr=0.01", "optim.warmup_steps=0")
    trainer(tmp_path, (*words, *correction)).fit()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    assert ["time/policy_logprobs" in row for row in steps] == [dropout > 0] * 2
    for row in steps if dropout else ():
        assert row["mismatch/ratio_min"] == pytest.approx(1.0, abs=1e-3)
        assert row["mismatch/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert (row["loss/clip_fraction"], row["loss/policy_ratio_mean"]) == (0.0, 1.0)
