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
        ("auto", "auto", {"adapter": "somewhere"}, BFLOAT16, FLOAT32),
        ("auto", "none", LORA, FLOAT32, FLOAT32),
        ("auto", "bfloat16", LORA, BFLOAT16, BFLOAT16),
        ("bfloat16", "auto", NONE, BFLOAT16, ("bfloat16", "none")),
        ("float32", "auto", LORA, ("float32", "bfloat16"), FLOAT32),
        ("float32", "none", LORA, FLOAT32, FLOAT32),
        ("float32", "bfloat16", NONE, ("float32", "bfloat16"), ("float32", "bfloat16")),
    ],
)
def test_what_auto_comes_to_is_reported_in_a_line_and_so_is_a_slow_choice(
    dtype: str, autocast: str, adapters: Any, on_fast: Any, on_slow: Any
) -> None:
    typed = replace(made.settings(), model=replace(made.model(), dtype=dtype, autocast=autocast, **adapters))
    for fast, expected in ((True, on_fast), (False, on_slow)):
        lines: list[str] = []
        found = decided(typed, lines.append, fast).model
        assert (found.dtype, found.autocast) == expected
        is_auto, is_slow = "auto" in (dtype, autocast), not fast and "bfloat16" in expected
        assert len(lines) == (is_auto or is_slow)
        for name, word in (("dtype", dtype), ("autocast", autocast)):
            assert word != "auto" or f"model.{name}=auto is {getattr(found, name)}" in lines[0]
        assert is_auto or not is_slow or ("slower" in lines[0] and "model.autocast=none" in lines[0])


@pytest.mark.parametrize(
    "has, fast",
    [
        ({"architecture": "x86_64", "amx_bf16": True, "avx512_bf16": False}, True),
        ({"architecture": "x86_64", "amx_bf16": False, "avx512_bf16": True}, True),
        ({"architecture": "x86_64", "avx512_f": True, "amx_bf16": False, "avx512_bf16": False}, False),
        ({"architecture": "arm64", "bf16": True}, False),
    ],
)
def test_a_processor_is_asked_for_its_extensions(has: Any, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fast_in_bfloat16("cpu") == fast_in_bfloat16("auto") == fast


def test_a_gpu_is_asked_for_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turing computes bfloat16 too, many times as slowly: emulation does not count."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for kernels in (True, False):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, own=kernels: own or including_emulation
        )
        assert fast_in_bfloat16("cuda") == fast_in_bfloat16("auto") == kernels


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
    assert record.about["changed"] == ["train.steps=1 is 2"]
    assert "auto" not in on(True, "eval", "checkpoint=run", "eval.problems=1", "hydra.run.dir=seen")
    assert json.loads(Path("seen/run.json").read_text())["config"]["model"]["autocast"] == "none"
