"""`model.dtype=auto` and `model.autocast=auto`: what they come to, where it is written down, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from typer.testing import CliRunner

from grpo_cli.cli.main import app
from grpo_cli.config.auto import decided
from grpo_cli.runs.record import read_record
from grpo_cli.support.processor import fast_in_bfloat16

LORA, NONE = {"lora": made.lora(rank=4)}, {"lora": made.lora(rank=0)}
SHORT = ("model=hf", "model.path=tiny", "logger=jsonl", "device=cpu", "n=2", "train.prompts=1", "eval.every=0")
FLOAT32, BFLOAT16 = ("float32", "none"), ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    "dtype, autocast, adapters, on_fast, on_slow",
    [
        ("auto", "auto", NONE, ("float32", "bfloat16"), FLOAT32),
        ("auto", "auto", LORA, BFLOAT16, FLOAT32),
        ("auto", "none", LORA, FLOAT32, FLOAT32),
        ("auto", "bfloat16", LORA, BFLOAT16, BFLOAT16),
        ("bfloat16", "auto", NONE, BFLOAT16, ("bfloat16", "none")),
        ("float32", "bfloat16", NONE, ("float32", "bfloat16"), ("float32", "bfloat16")),
    ],
)
def test_what_auto_comes_to(dtype: str, autocast: str, adapters: Any, on_fast: Any, on_slow: Any) -> None:
    typed = replace(made.settings(), model=replace(made.model(), dtype=dtype, autocast=autocast, **adapters))
    for fast, expected in ((True, on_fast), (False, on_slow)):
        found = decided(typed, fast).model
        assert (found.dtype, found.autocast) == expected


def test_a_processor_is_asked_for_its_extensions_and_a_gpu_for_kernels_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turing computes bfloat16 too, many times as slowly: emulation does not count."""
    has = {"architecture": "x86_64", "avx512_f": True, "amx_bf16": False, "avx512_bf16": False}
    for more, fast in (({}, False), ({"amx_bf16": True}, True), ({"architecture": "arm64", "bf16": True}, False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda more=more: has | more)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert fast_in_bfloat16("cpu") == fast_in_bfloat16("auto") == fast
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for own in (True, False):
        supported = lambda including_emulation, own=own: own or including_emulation  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
        assert fast_in_bfloat16("cuda") == fast_in_bfloat16("auto") == own


def test_a_run_goes_on_as_it_began_on_a_machine_that_would_choose_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def on(fast: bool, *words: str) -> str:
        monkeypatch.setattr("grpo_cli.support.processor.fast_in_bfloat16", lambda device: fast)
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        return result.output

    train = ("train", *SHORT, "sampling.max_new_tokens=4", "model.lora.rank=1", "hydra.run.dir=run")
    assert "float32, on cpu" in on(False, *train, "train.steps=1")
    on(True, "train", "resume=run", "train.steps=2")
    record = read_record(Path("run"))
    assert record is not None and (record.config["model"]["dtype"], record.config["model"]["autocast"]) == FLOAT32
    assert record.about["changed"] == ["train.steps=2 (was 1)"]
    assert "auto" not in on(True, "eval", "checkpoint=run", "eval.problems=1", "hydra.run.dir=seen")
    assert json.loads(Path("seen/run.json").read_text())["config"]["model"]["autocast"] == "none"
