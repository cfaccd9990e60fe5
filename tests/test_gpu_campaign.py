"""`scripts/gpu_campaign.sh` on a CPU at toy size: parts run to their end, and all criteria find their figures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

import made
import pytest
from processes import ROOT, Forked

from grpo_cli.config.check import check

SCRIPTS = Path(__file__).parents[1] / "scripts"


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


@pytest.mark.study
@pytest.mark.parametrize("part", ["decode", "learn"])
def test_a_part_runs_at_toy_size(part: str, campaign: ModuleType, tmp_path: Path) -> None:
    assert campaign.main([part, str(tmp_path), "--device", "cpu"]) == 0
    told = json.loads((tmp_path / f"{part}.json").read_text())
    assert {*told["found"]} == {command.name for command in campaign.PARTS[part]().commands}
    assert told["checks"] and all(isinstance(check["holds"], bool) for check in told["checks"])


def test_every_command_is_accepted_and_every_criterion_is_missed_where_nothing_was_found(campaign: ModuleType) -> None:
    for make in campaign.PARTS.values():
        part = make()
        for command in part.commands:
            if command.words[0] in ("train", "profile"):
                name, *words = (*command.words, *command.at_toy_size)
                check(made.composed(*words, command=name))
        assert not any(check.holds for check in part.wanted({one.name: {"code": 124} for one in part.commands}))


def figures(decode: float, tokens: float = 0.0) -> dict[str, Any]:
    """Of 10 steps of a model of 6.7e9 float32 bytes, which reads half of that in bfloat16 in a millisecond."""
    phases = {"decode": {"tokens_per_second": tokens, "seconds_median": 0.01 * decode}}
    measured = {"peak": {"bytes": 100}, "phases": phases, "engine": {"engine/decode_steps": 10.0}}
    predicted = {"peak": {"bytes": 95}, "phases": {"optimizer": {"held_by": {"weights": 6.7e9}}}}
    return {"code": 0, "profile.json": {"predicted": predicted, "measured": measured}}


def test_criteria_hold_or_are_missed_by_their_numbers(campaign: ModuleType) -> None:
    part = campaign.PARTS["decode"]()
    holds = {check.words: check.holds for check in part.wanted({one.name: figures(1.7) for one in part.commands})}
    assert [holds[f"decode over its floor, {rows} rows"] for rows in (64, 256)] == [True, False]
    part = campaign.PARTS["rollouts"]()
    speeds = {"full": 30_000.0, "micro": 10_000.0, "infinite": 12_000.0}
    found = {command.name: figures(1.0, speeds[command.name]) for command in part.commands}
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
