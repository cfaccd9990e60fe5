"""What `grpo` says to command lines that cannot be used: some of those that scripts/bad_commands.py makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SCRIPTS

sys.path.append(str(SCRIPTS))


@pytest.mark.study
def test_forty_bad_command_lines_are_each_refused_by_the_name_of_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "bad_commands.py"), "--count", "40", "--json", str(tmp_path / "told")]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}, capture_output=True, text=True
    )
    assert ended.stdout == "40 command lines: 0 traceback, 0 silent, 0 unnamed\n", ended.stderr
    told = json.loads((tmp_path / "told").read_text())
    assert told["commands"] == 40 and {answer["code"] for answer in told["answers"]} == {2}


def test_an_answer_has_a_fault_unless_it_is_a_refusal_that_names_the_key() -> None:
    from bad_commands import Answer, BadCommand, bad_commands

    asked = bad_commands(seed=1)
    assert len(asked) == len(set(asked)) >= 400 and asked != bad_commands(seed=2)
    told = {
        "": (2, "error: n=0 must be at least 2"),
        "traceback": (1, "Traceback (most recent call last)\n n=0"),
        "silent": (0, "n=0"),
        "unnamed": (2, "error: it cannot be used"),
    }
    found = {Answer(BadCommand(("train", "n=0"), "n=0"), *answer).fault for answer in told.values()}
    assert found == set(told) and Answer(BadCommand(("train",), "n"), None, "n").fault == "silent"
