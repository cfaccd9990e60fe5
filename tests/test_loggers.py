"""TensorBoard and Trackio, with the real libraries where they are there: the names and numbers of metrics.jsonl."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import made
import pytest
from test_resume import trained

from grpo_cli.support.errors import UserError
from grpo_cli.tracking.redact import HIDDEN
from grpo_cli.tracking.tensorboard import TensorBoardTracker
from grpo_cli.types import Record

WORDS = ("eval.every=2", "eval.problems=4")
# Of the libraries, at their import.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def same(found: dict[int, dict[str, float]], folder: Path) -> bool:
    """True if these are the numbers of `metrics.jsonl`, up to the rounding of an event file."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    expected = {row.pop("step"): {name: float(value) for name, value in row.items()} for row in rows}
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        assert found[step] == {name: pytest.approx(value, rel=1e-6, nan_ok=True) for name, value in row.items()}
    return True


# TensorBoard


def scalars(folder: Path) -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "events"))
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(event.step, {})[name] = event.value
    return found


def test_tensorboard_has_what_the_files_have_also_after_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trained(tmp_path, *WORDS, "logger=tensorboard", "train.steps=3", "train.checkpoint_every=2")
    # As a kill after the checkpoint of step 2 leaves it: step 3 is made again.
    (tmp_path / "checkpoints" / "step_000003" / "COMPLETE").unlink()
    (tmp_path / "summary.json").unlink()
    trained(tmp_path, *WORDS, "logger=tensorboard", f"resume={tmp_path}", "train.steps=4")
    assert same(scalars(tmp_path), tmp_path), "no step is there twice"


def test_tensorboard_s_texts_hide_secrets_and_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    said, warned = list[str](), list[str]()
    tracker = TensorBoardTracker(tmp_path, {"api_key": "k" * 12}, say=said.append, warn=warned.append)
    tracker.log(Record(1, {"reward/mean": math.nan}))
    assert "tensorboard --logdir" in said[0]

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    tracker._writer.add_scalar = full
    tracker.log(Record(2, {"reward/mean": 1.0}))
    tracker.log(Record(3, {"reward/mean": 1.0}))
    tracker.close({"status": "completed"})
    assert len(warned) == 1 and "No space left" in warned[0] and "metrics.jsonl" in warned[0]
    found = b"".join(file.read_bytes() for file in (tmp_path / "events").iterdir())
    assert b"kkkk" not in found and HIDDEN.encode() in found


# Trackio


def fake(calls: list[Any], fails: type[Exception] | None = None) -> ModuleType:
    """A `trackio` that notes what it is given, and prints."""

    class Run:
        def log(self, values: dict[str, Any], step: int) -> None:
            calls.append((step, values))
            if fails is not None and step:
                raise fails("no\nroom")

        def finish(self) -> None:
            calls.append("finished")

    def init(**about: Any) -> Run:
        print("* Trackio")
        if fails is ConnectionError:
            raise fails("no such space")
        calls.append(about)
        return Run()

    module = ModuleType("trackio")
    module.init, module.__spec__ = init, SimpleNamespace()  # type: ignore[attr-defined, assignment]
    return module


def trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, **words: Any) -> Any:
    monkeypatch.setitem(sys.modules, "trackio", module)
    offered = {"run_dir": tmp_path / "one", "config": {"n": 4, "api_key": "s3cr3t"}, **words}
    return made.ready("logger", "trackio", offered)


def test_trackio_gets_the_metrics_by_step_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, said = list[Any](), list[str]()
    tracker = trackio(tmp_path, monkeypatch, fake(calls), say=said.append)
    tracker.log(Record(0, {"eval/accuracy": 0.5}))
    tracker.log(Record(1, {"reward/mean": 0.25}))
    tracker.close({"status": "completed", "final_accuracy": 0.75})
    about, *rest = calls
    assert (about["project"], about["name"], about["resume"]) == ("grpo-cli", "one", "allow")
    assert (about["config"]["n"], about["config"]["api_key"]) == (4, HIDDEN)
    assert rest == [
        (0, {"eval/accuracy": 0.5}),
        (1, {"reward/mean": 0.25}),
        (1, {"summary/final_accuracy": 0.75}),
        "finished",
    ]
    assert "trackio show --project grpo-cli" in said[0] and capsys.readouterr().out == ""


def test_a_trackio_that_does_not_start_is_an_error_and_one_that_fails_later_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="trackio did not start: no such space"):
        trackio(tmp_path, monkeypatch, fake([], ConnectionError))
    calls, warned = list[Any](), list[str]()
    tracker = trackio(tmp_path, monkeypatch, fake(calls, OSError), say=str, warn=warned.append)
    for step in (1, 2):
        tracker.log(Record(step, {}))
    tracker.close({})
    assert len(warned) == 1 and "(no)" in warned[0] and len(calls) == 2
    bug = trackio(tmp_path, monkeypatch, fake([], TypeError), say=str)
    with pytest.raises(TypeError):
        bug.log(Record(1, {}))
