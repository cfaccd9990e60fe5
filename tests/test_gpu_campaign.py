"""`scripts/gpu_campaign.sh` on a CPU at toy size: every part runs to its end, and its criteria find their figures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

import pytest
from processes import ROOT, Forked

SCRIPTS = Path(__file__).parents[1] / "scripts"


PARTS = [
    "decode",
    *(pytest.param(part, marks=pytest.mark.study) for part in ("contact", "rollouts", "sparse", "update", "learn")),
]


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS / "gpu"))
    campaign = importlib.import_module("campaign")
    monkeypatch.setattr(campaign, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))
    return campaign


def run(line: list[str], stdout: TextIO, **settings: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run`, but that `python -P -m grpo_cli` is forked."""
    if "grpo_cli" not in line:
        return subprocess.run(line, stdout=stdout, **settings)
    process = Forked(*line[4:], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    stdout.write(process.communicate()[0])
    return subprocess.CompletedProcess(line, process.wait())


@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_at_toy_size(part: str, campaign: ModuleType, tmp_path: Path) -> None:
    assert campaign.main([part, str(tmp_path), "--device", "cpu"]) == 0
    told = json.loads((tmp_path / f"{part}.json").read_text())
    assert {*told["found"]} == {command.name for command in campaign.PARTS[part]().commands}
    assert told["checks"] and all(isinstance(check["holds"], bool) for check in told["checks"])


def figures(decode: float, tokens: float = 0.0) -> dict[str, Any]:
    phases = {"decode": {"tokens_per_second": tokens}}
    peaks = {"predicted": {"peak": {"bytes": 95}}, "measured": {"peak": {"bytes": 100}, "phases": phases}}
    return {"code": 0, "profile.json": peaks | {"roofline": {"phases": {"decode": {"times_floor": decode}}}}}


def test_criteria_hold_or_are_missed_by_their_numbers(campaign: ModuleType) -> None:
    part = campaign.PARTS["decode"]()
    found = {command.name: figures(1.7) for command in part.commands}
    holds = {check.words: check.holds for check in part.wanted(found)}
    assert (
        holds["decode over its floor, 64 rows, as graphs"] and not holds["decode over its floor, 256 rows, as graphs"]
    )
    assert not all(check.holds for check in part.wanted({command.name: {"code": 124} for command in part.commands}))
    part = campaign.PARTS["rollouts"]()
    speeds = {"full": 30_000.0, "micro": 10_000.0, "infinite": 12_000.0}
    found = {command.name: figures(1.0, speeds[command.name.partition(",")[0]]) for command in part.commands}
    missed = [str(check) for check in part.wanted(found) if not check.holds]
    assert missed == ["MISSED infinite over micro, tokens/s: 1.200 (wanted >= 1.25)"]


def test_a_command_over_its_limit_ends_and_the_part_goes_on(campaign: ModuleType, tmp_path: Path) -> None:
    endless = campaign.Command("endless", ("-c", "import time; time.sleep(60)"), 0.5)
    assert campaign.carried_out(endless, "cpu", tmp_path / "0") == {"code": 124}
    wrong = campaign.Command("wrong", ("-c", "raise SystemExit('a reason')"), 30)
    assert campaign.carried_out(wrong, "cpu", tmp_path / "1") == {"code": 1}


def test_the_script_tells_its_parts() -> None:
    script = SCRIPTS / "gpu_campaign.sh"
    told = subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(f"{number} {name}" in told for number, name in enumerate(["contact", "decode", "rollouts"], 1))
    wrong = subprocess.run([script, "7", "out"], capture_output=True, text=True, env={"PYTHON": sys.executable})
    assert wrong.returncode == 2 and "invalid choice: '7'" in wrong.stderr
