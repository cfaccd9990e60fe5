"""The edges: links in a run folder, own code that changes what the run shares."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_cli.runs.lock import sole_use
from grpo_cli.support.errors import UserError, own_code
from grpo_cli.tracking.jsonl import JsonlTracker
from grpo_cli.types import Record

WRITES: dict[str, Callable[[Path], Any]] = {
    ".lock": lambda run: contextlib.ExitStack().enter_context(sole_use(run, print)),
    "metrics.jsonl": lambda run: JsonlTracker(run, resumed=True).log(Record(1, {})),
    "rollouts.jsonl": lambda run: JsonlTracker(run, resumed=True),
}


@pytest.mark.parametrize("name", WRITES)
def test_no_link_in_a_run_folder_is_written_through(tmp_path: Path, name: str) -> None:
    """The file that it leads to stays as it was, or is not made."""
    (tmp_path / "R" / "checkpoints").mkdir(parents=True)
    (tmp_path / "precious").write_text("not\nto be\ncut")
    for target in ("precious", "absent"):
        link = tmp_path / "R" / name
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / target)
        with contextlib.suppress(UserError):
            WRITES[name](tmp_path / "R")
    assert (tmp_path / "precious").read_text() == "not\nto be\ncut" and not (tmp_path / "absent").exists()


def test_what_own_code_changes_of_what_the_run_shares_is_put_back() -> None:
    states: dict[str, Callable[[], Any]] = {
        "os.chdir('/')": os.getcwd,
        "sys.stdout = sys.stderr": lambda: sys.stdout,
        "torch.set_grad_enabled(False)": torch.is_grad_enabled,
        "torch.set_default_dtype(torch.float64)": torch.get_default_dtype,
        "torch.autocast('cpu', torch.bfloat16).__enter__()": lambda: torch.is_autocast_enabled("cpu"),
    }
    for line, state in states.items():
        before = state()
        with pytest.raises(UserError, match="^mine raised ValueError"), own_code("mine"):
            exec(line)
            assert state() != before
            raise ValueError
        assert state() == before
