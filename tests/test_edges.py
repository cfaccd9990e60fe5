"""The edges: damaged and odd files, signals that come twice, sizes that nothing has, own code that fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_cli.runs.find import completed_steps
from grpo_cli.runs.lock import sole_use
from grpo_cli.runs.stop import TOGETHER_SECONDS, Stop
from grpo_cli.support.errors import UserError, own_code
from grpo_cli.tracking.jsonl import JsonlTracker
from grpo_cli.types import Record


def finished(folder: Path, step: object, *saved: int) -> int | None:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    for number in saved:
        (folder / "checkpoints" / f"step_{number:06d}").mkdir()
        (folder / "checkpoints" / f"step_{number:06d}" / "COMPLETE").touch()
    (folder / "summary.json").write_text(json.dumps({"status": "completed", "step": step}))
    return completed_steps(str(folder))


def test_a_run_is_done_where_its_last_checkpoint_is_whatever_its_summary_says(tmp_path: Path) -> None:
    assert finished(tmp_path / "R", 3, 2, 3) == 3
    assert finished(tmp_path / "forged", 80, 2, 3) is None
    assert finished(tmp_path / "emptied", 3) is None
    assert [finished(tmp_path / str(odd), odd, 1) for odd in (None, "1", 1.5, True, [1])] == [None] * 5


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


def test_a_second_sigterm_that_comes_later_ends_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("grpo_cli.runs.stop.time.monotonic", lambda: now)
    with Stop(lambda line: None) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        now += 60
        for _ in range(3):  # to a run and to who has started it
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.stopped_by == "SIGUSR1"
        now += TOGETHER_SECONDS + 0.5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("os.chdir('/')", os.getcwd),
        ("sys.stdout = None", lambda: sys.stdout),
        ("torch.set_grad_enabled(False)", torch.is_grad_enabled),
        ("torch.set_default_dtype(torch.float64)", torch.get_default_dtype),
        ("torch.autocast('cpu', torch.bfloat16).__enter__()", lambda: torch.is_autocast_enabled("cpu")),
    ],
)
def test_what_own_code_changes_of_what_the_run_shares_is_put_back(line: str, state: Callable[[], Any]) -> None:
    before = state()
    with own_code("mine"):
        exec(line)
        assert state() != before
    assert state() == before
    with pytest.raises(UserError, match="mine raised"), own_code("mine"):
        exec(line)
        raise ValueError
    assert state() == before
