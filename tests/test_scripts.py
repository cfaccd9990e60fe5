"""Every bench says what it takes and works at a small size, and what all of them share. No clock is judged."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import common
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
BENCHES = [path.stem for path in (SCRIPTS / "bench").glob("*.py") if path.stem not in ("arms", "common", "step")]
# What a small run of each bench is asked with besides --quick; the others have tests of their own.
SMALL = {"memory": (), "real": ("--parts", "floor", "train")}
# They need a commit to compare with, a control group (Linux, as root), a real model and TRL.
BY_HAND = ("against", "fit", "time_to_accuracy")


@pytest.mark.study
@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_tells_its_options(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "--json" in said and "--quick" in said
    assert f"scripts/bench/{name}.py" in said


def test_no_bench_goes_untried():
    assert {*SMALL, "rollout", *BY_HAND} == set(BENCHES)


@pytest.mark.study
@pytest.mark.filterwarnings("ignore:This process .*fork:DeprecationWarning")
@pytest.mark.parametrize("name", SMALL)
def test_a_bench_works_at_a_small_size_and_leaves_its_figures(name: str, tmp_path: Path):
    out = tmp_path / "figures" / "out.json"
    assert importlib.import_module(name).main([*SMALL[name], "--quick", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["settings"]["quick"] is True and {"torch", "machine", "load"} <= found["environment"].keys()
    assert len(found.keys() - {"settings", "environment", "checks"}) >= 1


def test_every_arm_takes_every_turn():
    order: list[str] = []
    arms = {name: lambda name=name: order.append(name) or {"x": len(order)} for name in "abc"}
    turns = common.in_turns(arms, 3)
    assert "".join(order) == "abcbcacab"
    assert [turn["a"]["x"] for turn in turns] == [1, 6, 8]


def test_a_bound_that_is_missed_is_said_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args = argparse.Namespace(json=tmp_path / "out.json", rounds=3)
    checks = [common.Check("sorts", 2.5, most=3), common.Check("speed", 1.1, least=1.25)]
    assert common.finish(args, {"results": {}}, checks[:1]) == 0
    assert common.finish(args, {"results": {}}, checks) == 1
    assert "MISSED speed: 1.100 (wanted >= 1.25)" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(check["words"], check["holds"]) for check in found["checks"]] == [("sorts", True), ("speed", False)]


def test_a_suite_that_leaves_a_run_behind_fails(tmp_path: Path):
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(Path(__file__).parent / "conftest.py", tests)
    (tmp_path / "summary.json").write_text("of another day")

    def tried(writes: str) -> subprocess.CompletedProcess[str]:
        (tests / "test_it.py").write_text(f"def test_it():\n    open({writes!r}, 'w').close()\n")
        command = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    left = tried("metrics.jsonl")
    assert left.returncode == 1 and str(tmp_path / "metrics.jsonl") in left.stderr
    assert tried("summary.json").returncode == tried("metrics.jsonl").returncode == 0, "only what is new"
