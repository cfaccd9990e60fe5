"""The settings of libraries that a process makes: what is documented for the processor, and never against the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_cli.support import processor
from grpo_cli.support.errors import UserError

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
