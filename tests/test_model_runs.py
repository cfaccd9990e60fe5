"""Whole short runs with adapters, offloaded averages and shared prompts: they resume bit for bit; others read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import made
import pytest
import torch
import yaml
from test_resume import cut_off_and_resumed, rows
from transformers import AutoModelForCausalLM
from typed import done, json_lines, refused

from grpo_cli import experiment
from grpo_cli.config.compose import composed, settings_from, settings_of
from grpo_cli.config.recorded import of_the_weights
from grpo_cli.experiment import build
from grpo_cli.runs.layout import METRICS

# With this seed the rewards of every step differ, so that there is something to learn in each.
COMMON = ("n=8", "seed=1", "train.prompts=2", "train.checkpoint_every=1", "train.keep_checkpoints=9")
SHORT = ("eval.every=0", "sampling.max_new_tokens=10", "train.steps=2")
LORA = ("model.lora.rank=2",)


def trainer(folder: Path, words: Sequence[str]) -> Any:
    return build(made.composed("logger=jsonl", *COMMON, *SHORT, *words, f"run_dir={folder}"))


@pytest.mark.parametrize(
    "words",
    [
        (*LORA, "loss.kl_coef=0.04", "model.lora.dropout=0.1"),
        (*LORA, "model.random_init=true", "model.dtype=bfloat16"),
        ("optim.offload=true", "model.gradient_checkpointing=full"),
    ],
    ids=" ".join,
)
def test_a_resumed_run_equals_one_left_alone(words, tmp_path):
    cut_off_and_resumed(tmp_path, *COMMON, *SHORT, *words, step=2)


def test_a_resumed_run_keeps_the_shape_of_its_adapters_and_may_change_their_dropout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done("train", "logger=jsonl", *COMMON, *SHORT, *LORA, "model.lora.dropout=0.1", "hydra.run.dir=run")
    longer = ["resume=run", "train.steps=3"]
    assert "model.lora.alpha is not that of the run" in refused("train", *longer, "model.lora.alpha=99")
    resumed = build(settings_from(composed("train", [*longer, "model.lora.dropout=0.5"])))
    assert {m.p for m in resumed._parts.runtime.model.modules() if isinstance(m, torch.nn.Dropout)} == {0.5}


def test_averages_in_the_cpus_memory_change_nothing_and_plain_transformers_says_the_same(tmp_path):
    (run := trainer(tmp_path / "plain", ())).fit()
    (offloaded := trainer(tmp_path / "offloaded", ("optim.offload=true",))).fit()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain" / "checkpoints" / "step_000002")
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        for model in (loaded, offloaded._parts.runtime.model):
            assert torch.equal(model(ids).logits, run._parts.runtime.model(ids).logits)


def test_the_reference_takes_no_memory_unless_adapters_were_there_before(tmp_path):
    """Saved ones are found with their base."""
    pytest.importorskip("peft")
    first = trainer(tmp_path / "first", (*LORA, "loss.kl_coef=0.04", "optim.lr=0.01", "optim.warmup_steps=0"))
    assert first._parts.reference is first._parts.runtime.model
    first.fit()
    assert rows(tmp_path / "first")[-1]["loss/kl"]
    saved = tmp_path / "first" / "checkpoints" / "step_000002"
    values = of_the_weights(saved, None)
    assert values["model.adapter"] == str(saved) and values["model.path"].endswith("tiny")
    further = trainer(tmp_path / "further", (f"model.adapter={saved}", "loss.kl_coef=0.04"))
    ids, reference = torch.arange(2, 40)[None], further._parts.reference
    assert reference is not further._parts.runtime.model and not any(p.requires_grad for p in reference.parameters())
    with torch.no_grad():  # training goes on from what was saved, and that is what it is kept near to
        expected = first._parts.runtime.model(ids).logits
        assert torch.equal(further._parts.runtime.model(ids).logits, expected)
        assert torch.equal(reference(ids).logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "words",
    [("optim.offload=true",), ("optim.name=adamw8bit",), ("model.autocast=bfloat16", *LORA, "model.quantize=4bit")],
    ids=" ".join,
)
def test_a_run_completes_and_goes_on_on_a_gpu(words, tmp_path):
    pytest.importorskip("bitsandbytes")
    summary = trainer(tmp_path, (*words, "device=cuda")).fit()
    assert summary["status"] == "completed" and summary["updates"] == 2
    again = trainer(tmp_path, (*words, "device=cuda", "train.steps=3", f"resume={tmp_path}")).fit()
    assert again["updates"] == 3


# Every part of the torch path once, each by itself


BASE = ("train.steps=2", "train.prompts=4", "n=8", "m=8", "eval.every=0", "sampling.max_new_tokens=24", "logger=jsonl")
TRIED = yaml.safe_load((Path(__file__).parent / "contact.yaml").read_text(encoding="utf-8"))
# Log ratios of sampler and policy: by how much a mean may be off, and how far the smallest thousandth may lie.
CLOSE, FAR = {"float32": 1e-3, "bfloat16": 0.02, "autocast": 0.02}, {"float32": 0.01, "bfloat16": 0.5, "autocast": 0.5}
CASES = {
    f"{family}, {precision}": (precision, (*words, *more))
    for family, words in TRIED["families"].items()
    for precision, more in TRIED["precisions"].items()
} | {way: ("float32", (*words, *TRIED["precisions"]["float32"])) for way, words in TRIED["ways"].items()}
ON_CPU = ("embedded, autocast", "rkv, prompts too", "adapters, checkpointing")  # other tests prove the parts there


@pytest.mark.parametrize(
    ("device", "case"),
    [
        *(pytest.param("cpu", case, marks=pytest.mark.study) for case in ON_CPU),
        *(pytest.param("cuda", case, marks=pytest.mark.gpu) for case in CASES),
    ],
)
def test_rollouts_are_drawn_from_the_policy_and_every_metric_is_finite(device, case, tmp_path):
    precision, words = CASES[case]
    experiment.build(settings_of(*BASE, *words, f"device={device}", f"run_dir={tmp_path}")).fit()
    rows = json_lines(tmp_path / METRICS)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    last = [row for row in rows if "mismatch/kl" in row][-1]  # a step without a gradient has none
    if "correction=sparse_rl" not in words:
        assert abs(last["mismatch/ratio_mean"] - 1) < CLOSE[precision]
        assert last["mismatch/log_ratio_q001"] > -FAR[precision]
