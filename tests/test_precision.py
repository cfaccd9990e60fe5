"""`model.dtype=auto` and `model.autocast=auto`: what they come to, where it is written down, and what is said of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from typed import done

from grpo_cli.config.auto import decided
from grpo_cli.runs.record import read_record
from grpo_cli.support import processor
from grpo_cli.support.errors import UserError
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
def test_what_auto_comes_to_is_reported_in_a_line_and_so_is_a_slow_choice(
    dtype: str, autocast: str, adapters: Any, on_fast: Any, on_slow: Any
) -> None:
    typed = replace(made.settings(), model=replace(made.model(), dtype=dtype, autocast=autocast, **adapters))
    for fast, expected in ((True, on_fast), (False, on_slow)):
        lines: list[str] = []
        found = decided(typed, lines.append, fast).model
        assert (found.dtype, found.autocast) == expected
        assert len(lines) == ("auto" in (dtype, autocast) or (not fast and "bfloat16" in expected))


@pytest.mark.parametrize("own", [True, False])
def test_a_gpu_that_emulates_bfloat16_is_not_fast_in_it(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turing computes it, too, many times as slowly."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: own or including_emulation)
    assert fast_in_bfloat16("cuda") == fast_in_bfloat16("auto") == own


def test_a_run_goes_on_as_it_began_on_a_machine_that_would_choose_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def on(fast: bool, *words: str) -> str:
        monkeypatch.setattr("grpo_cli.support.processor.fast_in_bfloat16", lambda device: fast)
        return done(*words)

    train = ("train", *SHORT, "sampling.max_new_tokens=4", "model.lora.rank=1", "hydra.run.dir=run")
    on(False, *train, "train.steps=1")
    on(True, "train", "resume=run", "train.steps=2")
    record = read_record(Path("run"))
    assert record is not None and (record.config["model"]["dtype"], record.config["model"]["autocast"]) == FLOAT32
    on(True, "eval", "checkpoint=run", "eval.problems=1", "hydra.run.dir=seen")
    assert json.loads(Path("seen/run.json").read_text())["config"]["model"]["autocast"] == "none"


# The settings of libraries that a process makes: what is documented for the processor, and never against the user.


SKYLAKE = "fpu sse4_2 avx avx2 avx512f avx512dq avx512cd avx512bw avx512vl"
USERS = {"OMP_WAIT_POLICY": "ACTIVE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7", "LRU_CACHE_CAPACITY": "7"}


@pytest.mark.parametrize(
    ("vendor", "flags", "given", "branch"),
    [
        ("GenuineIntel", SKYLAKE, {}, "AVX512,STRICT"),
        ("GenuineIntel", "fpu avx avx2 avx512f", {}, "AVX2,STRICT"),  # some of AVX-512 is not MKL's branch
        ("AuthenticAMD", SKYLAKE, {}, None),  # MKL takes these values for AUTO there
        ("GenuineIntel", SKYLAKE, {"MKL_CBWR": "COMPATIBLE"}, "COMPATIBLE"),
    ],
)
def test_what_is_documented_for_a_processor_is_set_unless_the_user_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, given: dict[str, str], branch: str | None
) -> None:
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel\t: 207\nflags\t: {flags}\n")
    environment, users = dict(given), {**given, **USERS}
    processor.set_variables(environment)
    processor.set_variables(users)
    assert environment.get("MKL_CBWR") == users.get("MKL_CBWR") == branch
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE" and USERS.items() <= users.items()


def test_one_of_several_processes_is_refused() -> None:
    processor.set_variables({"WORLD_SIZE": "1", "RANK": "0"})
    processor.set_variables({"WORLD_SIZE": "4"})  # of a cluster, without a launcher
    for rank in ("RANK", "LOCAL_RANK"):
        with pytest.raises(UserError, match="WORLD_SIZE=4"):
            processor.set_variables({"WORLD_SIZE": "4", rank: "3"})


def test_a_number_of_threads_that_is_none_is_refused_before_anything_is_loaded() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "two"}
    ended = subprocess.run(
        [sys.executable, "-m", "grpo_cli", "train"], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: OMP_NUM_THREADS=two") and ended.stderr.count("\n") == 1
