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
from grpo_cli.config.auto import decided, decided_model
from grpo_cli.runs.record import read_record
from grpo_cli.support.processor import fast_in_bfloat16

LORA, NONE = made.lora(rank=4), made.lora(rank=0)
SHORT = ("model=hf", "model.path=tiny", "logger=jsonl", "device=cpu", "n=2", "train.prompts=1", "eval.every=0")


@pytest.mark.parametrize(
    "dtype, autocast, lora, on_fast, on_slow",
    [
        ("auto", "auto", NONE, ("float32", "bfloat16"), ("float32", "none")),
        ("auto", "auto", LORA, ("bfloat16", "bfloat16"), ("float32", "none")),
        ("auto", "none", LORA, ("float32", "none"), ("float32", "none")),
        ("auto", "bfloat16", LORA, ("bfloat16", "bfloat16"), ("bfloat16", "bfloat16")),
        ("bfloat16", "auto", NONE, ("bfloat16", "bfloat16"), ("bfloat16", "none")),
        ("float32", "auto", LORA, ("float32", "bfloat16"), ("float32", "none")),
    ],
)
def test_what_auto_comes_to(dtype: str, autocast: str, lora: Any, on_fast: Any, on_slow: Any) -> None:
    asked = replace(made.model(), dtype=dtype, autocast=autocast, lora=lora)
    for fast, expected in ((True, on_fast), (False, on_slow)):
        found = decided_model(asked, fast)
        assert (found.dtype, found.autocast) == expected


def test_saved_adapters_are_adapters_too() -> None:
    found = decided_model(replace(made.model(), dtype="auto", autocast="auto", adapter="somewhere"), True)
    assert (found.dtype, found.autocast) == ("bfloat16", "bfloat16")


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
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, own=kernels: own)
        assert fast_in_bfloat16("cuda") == fast_in_bfloat16("auto") == kernels


def said(fast: bool, **model: Any) -> list[str]:
    lines: list[str] = []
    words = {"dtype": "auto", "autocast": "auto"} | model
    decided(replace(made.settings(), model=replace(made.model(), **words)), lines.append, fast)
    return lines


def test_the_choice_is_said_in_a_line_and_what_is_slow_though_it_was_asked_for() -> None:
    for fast, dtype, autocast in ((True, "bfloat16", "bfloat16"), (False, "float32", "none")):
        [line] = said(fast, lora=LORA)
        assert line.startswith(f"model.dtype=auto is {dtype}, model.autocast=auto is {autocast}: ")
        assert said(fast, dtype="float32", autocast="none") == []
    assert said(True, dtype="float32", autocast="bfloat16") == []
    [line] = said(False, dtype="float32", autocast="bfloat16")
    assert "slower" in line and "model.autocast=none" in line


def grpo(*words: str) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_goes_on_as_it_began_on_a_machine_that_would_choose_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("run")

    def on(fast: bool, *words: str) -> str:
        monkeypatch.setattr("grpo_cli.support.processor.fast_in_bfloat16", lambda device: fast)
        return grpo(*words)

    train = ("train", *SHORT, "sampling.max_new_tokens=4", "model.lora.rank=1", f"hydra.run.dir={run}")
    out = on(False, *train, "train.steps=1")
    assert "model.dtype=auto is float32, model.autocast=auto is none: bfloat16 is slower" in out
    assert "float32, on cpu" in out
    out = on(True, "train", f"resume={run}", "train.steps=2")
    record = read_record(run)
    assert record is not None and (record.config["model"]["dtype"], record.config["model"]["autocast"]) == (
        "float32",
        "none",
    )
    assert [path.name for path in run.glob("resumed_*.json")] == ["resumed_001.json"]  # for train.steps, no more
    out = on(True, "eval", f"checkpoint={run}", "eval.problems=1", "hydra.run.dir=seen")
    assert "auto" not in out
    assert json.loads((Path("seen") / "run.json").read_text())["config"]["model"]["autocast"] == "none"
