"""TensorBoard and Trackio, with the real libraries where they are there: the names and numbers of metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_resume import trained

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


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row.pop("step"): {name: float(value) for name, value in row.items()} for row in rows}


def same(found: dict[int, dict[str, float]], folder: Path, rel: float) -> bool:
    expected = metrics(folder)
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        assert found[step] == {name: pytest.approx(value, rel=rel, nan_ok=True) for name, value in row.items()}
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
    assert same(scalars(tmp_path), tmp_path, 1e-6)
    # As a kill after the checkpoint of step 2 leaves it: step 3 is made again.
    (tmp_path / "checkpoints" / "step_000003" / "COMPLETE").unlink()
    (tmp_path / "summary.json").unlink()
    trained(tmp_path, *WORDS, "logger=tensorboard", f"resume={tmp_path}", "train.steps=4")
    assert same(scalars(tmp_path), tmp_path, 1e-6), "no step is there twice"


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


@pytest.mark.process
def test_trackio_has_what_the_files_have_offline(tmp_path: Path) -> None:
    """In a process of its own: Trackio reads where it keeps things when it is imported."""
    pytest.importorskip("trackio")
    run, kept = tmp_path / "runs" / "one", tmp_path / "kept"
    words = ["n=4", "train.prompts=2", "sampling.max_new_tokens=12", *WORDS, "logger=trackio", f"hydra.run.dir={run}"]
    environment = {**os.environ, "TRACKIO_DIR": str(kept), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    asked = [sys.executable, "-m", "grpo_cli", "train", "train.steps=2", *words]
    done = subprocess.run(asked, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trackio show --project grpo-cli" in done.stdout and "* Trackio" not in done.stdout
    found = stored(kept, environment)
    assert found.keys() >= metrics(run).keys()
    for step, row in metrics(run).items():
        its = {name: value for name, value in found[step].items() if not name.startswith("summary/")}
        assert its == {name: pytest.approx(value) for name, value in row.items()}


def stored(kept: Path, environment: dict[str, str]) -> dict[int, dict[str, float]]:
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S; "
        "print('\\n' + json.dumps(S.get_logs('grpo-cli', 'one')))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    rows: dict[int, dict[str, float]] = {}
    for row in json.loads(done.stdout.splitlines()[-1]):
        step = row.pop("step")
        rows.setdefault(step, {}).update({name: float(v) for name, v in row.items() if name != "timestamp"})
    return rows
