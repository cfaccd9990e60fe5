"""Runs are killed, damaged and started twice, and lose nothing: a few trials of `scripts/crash_campaign.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import Forked

pytestmark = pytest.mark.study

SCRIPT = Path(__file__).parents[1] / "scripts" / "crash_campaign.py"


def carried_out(out: Path, campaign: str, count: int) -> list[dict[str, Any]]:
    told = out / f"{campaign}.json"
    command = [sys.executable, str(SCRIPT), campaign, f"--count={count}", f"--out={out}", f"--json={told}"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(told.read_text())["trials"]


def test_runs_that_are_killed_at_any_moment_come_to_what_they_come_to_undisturbed(tmp_path: Path) -> None:
    trials = carried_out(tmp_path, "kills", 5)
    assert sum(trial["kills"] + trial["stops"] for trial in trials) >= 4
    again = carried_out(tmp_path, "kills", 5)
    assert again == trials, "what was carried out is not carried out again"


def test_a_damaged_file_is_noticed_or_makes_no_difference(tmp_path: Path) -> None:
    outcomes = {trial["outcome"] for trial in carried_out(tmp_path, "damage", 6)}
    assert outcomes <= {"refused", "passed over, said", "differs, said", "made no difference"}
    assert outcomes & {"refused", "passed over, said"}


def test_of_two_that_continue_one_run_the_second_is_refused(tmp_path: Path) -> None:
    (trial,) = carried_out(tmp_path, "doubles", 1)
    assert trial["outcome"] == "refused"


def test_a_signal_to_a_process_that_has_just_ended_is_nothing(tmp_path: Path) -> None:
    """Its number is free once the server has waited for it, which is before the server's answer is here."""
    process = Forked("--version", cwd=tmp_path)
    process.communicate()
    process.poll = lambda: None  # type: ignore[method-assign]
    process.send_signal(signal.SIGKILL)
