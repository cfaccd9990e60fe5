"""The edges: damaged and odd files, signals that come twice, sizes that nothing has, own code that fails."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from typed import grpo

from grpo_cli.config.check import check
from grpo_cli.report.read import read_run
from grpo_cli.runs.files import read_object
from grpo_cli.runs.find import completed_steps
from grpo_cli.runs.lock import is_held, sole_use
from grpo_cli.runs.record import write_summary
from grpo_cli.runs.stop import TOGETHER_SECONDS, Stop
from grpo_cli.support.errors import UserError, own_code
from grpo_cli.tasks.model_judge import _append
from grpo_cli.tracking.jsonl import JsonlTracker
from grpo_cli.types import Record


@pytest.fixture(autouse=True)
def no_hanging(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What waits at a pipe is ended, and fails."""
    monkeypatch.chdir(tmp_path)

    def end(number: int, frame: Any) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


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


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "run.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    if name == ".lock":
        assert not is_held(tmp_path)
        with pytest.raises(UserError, match=r"\.lock"), sole_use(tmp_path, print):
            pass
        return
    if name == "metrics.jsonl":
        with pytest.raises(UserError, match=r"metrics\.jsonl cannot be written"):
            JsonlTracker(tmp_path, resumed=True)
    else:
        with pytest.raises(UserError, match=name):
            read_object(tmp_path / name)
    assert read_run(tmp_path, "R").notes


WRITES: dict[str, Callable[[Path], Any]] = {
    ".lock": lambda run: contextlib.ExitStack().enter_context(sole_use(run, print)),
    ".summary.json.tmp": lambda run: write_summary(run, {"status": "completed"}),
    "metrics.jsonl": lambda run: JsonlTracker(run, resumed=True).log(Record(1, {})),
    "rollouts.jsonl": lambda run: JsonlTracker(run, resumed=True),
    "judgements.jsonl": lambda run: _append(run / "judgements.jsonl", {"a": [1.0]}),
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
        ("sys.stdout = io.StringIO()", lambda: sys.stdout),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", lambda: signal.getsignal(signal.SIGTERM)),
        ("torch.set_grad_enabled(False)", torch.is_grad_enabled),
        ("torch.set_num_threads(7)", torch.get_num_threads),
        ("torch.autocast('cpu', torch.bfloat16).__enter__()", lambda: torch.is_autocast_enabled("cpu")),
    ],
)
def test_own_code_that_changes_what_the_run_shares_is_named_and_undone(line: str, state: Callable[[], Any]) -> None:
    before = state()
    with pytest.raises(UserError, match=r"^mine changed "), own_code("mine"):
        exec(line)
    assert state() == before
    with own_code("mine"):  # what leaves everything as it was, and new variables, are fine
        os.environ["MINE"] = "1"
        with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()), contextlib.chdir("/"):
            torch.zeros(2)
    assert os.environ.pop("MINE") == "1"


@pytest.mark.parametrize("changed", [{"n": 2**62, "m": 2**62}, {"n": 2**62, "m": 4}])
def test_a_step_of_more_rollouts_than_can_be_held_is_refused(changed: dict[str, int]) -> None:
    from dataclasses import replace

    with pytest.raises(UserError, match=f"n={2**62} "):
        check(replace(made.settings(), **changed))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["report", ""], "empty"),
        (["report", ".", "--out", " "], "--out"),
        (["export", "", "new"], "empty"),
        (["report", "other", "--out", "run"], "--out=run"),
    ],
)
def test_no_folder_and_the_folder_of_a_run_are_no_places_for_a_report(words: list[str], key: str) -> None:
    made.record(Path("run"), {})
    Path("other").mkdir()
    ended = grpo(*words)
    assert ended.exit_code == 2 and key in ended.output and os.listdir("run") == ["run.json"]
