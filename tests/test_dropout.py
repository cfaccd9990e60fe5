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
CPU = torch.device("cpu")
DROPPING = LoraSettings(rank=2, alpha=4.0, dropout=0.5, targets=("q_proj",), dora=False, rslora=False)
TINY = replace(made.model(), lora=DROPPING)
WORDS = ("model.lora.rank=2", "model.lora.dropout=0.5", "optim.lr=0.01", "optim.warmup_steps=0")
SPARSE_RL = "correction=sparse_rl"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_loaded_model_says_the_same_twice(checkpointing: bool) -> None:
    """In train mode, which gradient checkpointing asks for, it would not."""
    model = moved(load_model(replace(TINY, gradient_checkpointing="full" if checkpointing else "none"), CPU))
    assert not any(module.training for module in model.modules())
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
        assert not torch.equal(model.train()(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_recomputes_activations_where_that_was_asked_for(checkpointing: bool) -> None:
    model = load_model(replace(TINY, gradient_checkpointing="full" if checkpointing else "none"), CPU)
    calls: list[bool] = []
    layer: nn.Module = model.get_base_model().model.layers[0].mlp
    layer.register_forward_pre_hook(lambda module, _: calls.append(module.training))
    make_learner(model).update(make_batch(), 0)
    assert calls == [True] * (1 + checkpointing)


def records(folder: Path) -> list[dict[str, float]]:
    """What was logged of each step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward/mean" in row]


TRUNCATED = ("correction.importance=token", "correction.is_threshold=2")
VETOED = (*TRUNCATED, "correction.rejection=veto")


@pytest.mark.parametrize("correction", [(), VETOED], ids=["none", "veto"])
def test_dropout_is_no_mismatch_and_clips_nothing(correction: tuple[str, ...], tmp_path: Path) -> None:
    """The old policy of an update whose learner has not moved yet is the learner itself, dropout included."""
    trainer(tmp_path, (*WORDS, *correction)).fit()
    steps = records(tmp_path)
    assert len(steps) == 2
    for row in steps:
        assert row["mismatch/ratio_min"] == pytest.approx(1.0, abs=1e-3)
        assert row["mismatch/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert (row["loss/clip_fraction"], row["loss/policy_ratio_mean"]) == (0.0, 1.0)


@pytest.mark.parametrize(("dropout", "passes"), [("0", False), ("0.5", True)])
def test_only_dropout_costs_a_pass_of_its_own(dropout: str, passes: bool, tmp_path: Path) -> None:
    trainer(tmp_path, (*WORDS, f"model.lora.dropout={dropout}")).fit()
    assert ["time/policy_logprobs" in row for row in records(tmp_path)] == [passes, passes]
