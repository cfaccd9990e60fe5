"""What a process asks of its libraries: what is documented for the processor, and never against a person's word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_cli.support import processor
from grpo_cli.support.errors import UserError

SKYLAKE = "fpu sse4_2 avx avx2 avx512f avx512dq avx512cd avx512bw avx512vl"


def a_machine(folder: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str) -> None:
    text = f"processor\t: 0\nvendor_id\t: {vendor}\nmodel\t\t: 207\nflags\t\t: {flags}\nbogomips\t: 1\n"
    (folder / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "CPUINFO", folder / "cpuinfo")


@pytest.mark.parametrize(
    ("vendor", "flags", "set_already", "branch"),
    [
        ("GenuineIntel", SKYLAKE, {}, "AVX512,STRICT"),
        ("GenuineIntel", "fpu avx avx2 avx512f", {}, "AVX2,STRICT"),  # some of AVX-512 is not MKL's branch
        ("GenuineIntel", "fpu sse4_2 avx", {}, None),
        ("AuthenticAMD", SKYLAKE, {}, None),  # MKL takes what it is told there for AUTO
        ("GenuineIntel", SKYLAKE, {"MKL_ENABLE_INSTRUCTIONS": "avx2"}, "AVX2,STRICT"),
        ("GenuineIntel", SKYLAKE, {"MKL_CBWR": "COMPATIBLE"}, "COMPATIBLE"),  # a person's own
    ],
)
def test_strict_products_are_asked_for_where_they_are_documented(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vendor: str,
    flags: str,
    set_already: dict[str, str],
    branch: str | None,
) -> None:
    a_machine(tmp_path, monkeypatch, vendor, flags)
    environment = dict(set_already)
    processor.settle(environment)
    assert environment.get("MKL_CBWR") == branch
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_without_a_list_of_processors_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")
    kept = {"OMP_WAIT_POLICY": "ACTIVE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7", "LRU_CACHE_CAPACITY": "7"}
    environment = dict(kept)
    processor.settle(environment)
    assert environment == kept


@pytest.mark.parametrize("threads", ["0", "two", "", "2,0"])
def test_a_number_of_threads_that_is_none_is_refused(threads: str) -> None:
    with pytest.raises(UserError, match=f"OMP_NUM_THREADS={threads} must be a whole number of at least 1"):
        processor.settle({"OMP_NUM_THREADS": threads})


def test_one_of_several_processes_is_refused() -> None:
    processor.settle({"WORLD_SIZE": "1", "RANK": "0"})
    processor.settle({"WORLD_SIZE": "4"})  # of a cluster, without a launcher
    for rank in ("RANK", "LOCAL_RANK"):
        with pytest.raises(UserError, match="WORLD_SIZE=4"):
            processor.settle({"WORLD_SIZE": "4", rank: "3"})


def test_a_command_refuses_a_number_of_threads_before_it_loads_anything() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "0"}
    ended = subprocess.run(
        [sys.executable, "-m", "grpo_cli", "train"], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: OMP_NUM_THREADS=0 must be") and ended.stderr.count("\n") == 1
