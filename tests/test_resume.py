"""A run killed without warning goes on as if nothing had happened: whole runs and programs, real signals."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from processes import Forked
from safetensors.torch import load_file

from grpo_cli.config.compose import settings_of
from grpo_cli.experiment import build

WORDS = [
    "logger=jsonl",
    "n=4",
    "train.prompts=2",
    "train.steps=6",
    "train.checkpoint_every=2",
    "eval.every=0",
    "sampling.max_new_tokens=12",
]


def start(folder: Path, *words: str) -> Forked:
    return Forked("train", *words, cwd=folder)


def wait_for(folder: Path, what: str, process: Forked) -> None:
    """Until a file or folder is there. The limit is a guard against hanging, not part of what is tested."""
    for _ in range(1200):
        if list(folder.glob(what)):
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    raise AssertionError(f"{what} did not appear in {folder}")


def trained(folder: Path, *words: str) -> dict[str, Any]:
    """What a run in this process came to."""
    return build(settings_of(*WORDS, "train.steps=2", f"run_dir={folder}", *words)).fit()


def rows(folder: Path) -> list[dict[str, object]]:
    """The records of a run without what differs from one run of the same to the next."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    moving = ("time/", "clock/", "speed/", "memory/")
    return [{name: v for name, v in json.loads(line).items() if not name.startswith(moving)} for line in lines]


def records(folder: Path) -> tuple[list[dict[str, object]], str]:
    return rows(folder), (folder / "rollouts.jsonl").read_text()


def cut_off_and_resumed(tmp_path: Path, *words: str, step: int) -> None:
    """A run (`alone`), and the same as a kill leaves it in the save of that step, gone on with (`cut`): they record the
    same."""
    trained(tmp_path / "alone", *words)
    shutil.copytree(tmp_path / "alone", tmp_path / "cut")
    last = max((tmp_path / "cut" / "checkpoints").iterdir())
    assert last.name == f"step_{step:06d}", "a later checkpoint would be gone on from"
    (last / "COMPLETE").unlink()
    (tmp_path / "cut" / "summary.json").unlink()
    trained(tmp_path / "cut", *words, f"resume={tmp_path / 'cut'}")
    assert records(tmp_path / "cut") == records(tmp_path / "alone")


# The run that is to be killed waits in its third step (the first call is the trial's) while there is a file `hold`,
# so that it cannot end before.
HELD = """
import pathlib, time
from grpo_cli.rules.advantage import grpo

saved = pathlib.Path("outputs/train/killed/checkpoints/step_000002/COMPLETE")

def advantage(group, kept, **settings):
    while saved.exists() and pathlib.Path("hold").exists():
        time.sleep(0.05)
    return grpo(group, kept, **settings)
"""


FEW = "task.train_problems=12"
# The same in the middle of the third step's rollouts, as somebody is to take a slot that has fallen free.
HALFWAY = """
import pathlib, time
from grpo_cli.engine.scheduling import Fifo

saved = pathlib.Path("outputs/train/killed/checkpoints/step_000002/COMPLETE")

class Halfway(Fifo):
    def next(self, running):
        while saved.exists() and running and pathlib.Path("hold").exists():
            pathlib.Path("waiting").touch()
            time.sleep(0.05)
        return super().next(running)
"""


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param((), id="plain"),
        pytest.param(("curriculum=dps", "collector=partial", FEW), id="learning", marks=pytest.mark.process),
    ],
)
def test_kill_9_and_resume_equals_a_run_left_alone(tmp_path: Path, rules: tuple[str, ...]) -> None:
    held_up = (HELD, "advantage._target_=held.advantage", "outputs/train/killed/checkpoints/step_000002/COMPLETE")
    kill_and_resume(tmp_path, (*WORDS, *rules), *held_up)


@pytest.mark.process
def test_kill_9_in_the_middle_of_a_round_loses_no_partial_rollout(tmp_path: Path) -> None:
    words = (*WORDS, "collector=partial", "collector.max_lag=4", "sampler=infinite", "sampler.slots=3")
    words = (*words, "record.rollouts=-1", "optim.lr=1e-3")
    kill_and_resume(tmp_path, words, HALFWAY, "scheduler._target_=held.Halfway", "waiting")
    assert rows(tmp_path / "alone")[2]["collect/carried_tokens"], "the checkpoint holds some"
    ours, theirs = (tmp_path / run / "rollouts.jsonl" for run in ("alone", "outputs/train/killed"))
    assert ours.read_text() == theirs.read_text()


def kill_and_resume(tmp_path: Path, words: tuple[str, ...], code: str, held_up: str, until: str) -> None:
    """Two runs of the same words: one left alone, one that `code` holds up until a file is there, killed, and gone on
    with. They end alike."""
    alone = start(tmp_path, *words, "hydra.run.dir=alone")
    (tmp_path / "held.py").write_text(code)
    (tmp_path / "hold").touch()
    killed = start(tmp_path, *words, "hydra.run.dir=outputs/train/killed", held_up)
    wait_for(tmp_path, until, killed)
    killed.kill()
    killed.communicate()
    (tmp_path / "hold").unlink()
    said, _ = alone.communicate()
    assert alone.returncode == 0, said
    resumed = start(tmp_path, "resume=auto")
    said, _ = resumed.communicate()
    assert resumed.returncode == 0, said
    assert "resumed at step 2 " in said
    last = "checkpoints/step_000006"
    weights = load_file(tmp_path / "alone" / last / "model.safetensors")
    again = load_file(tmp_path / "outputs/train/killed" / last / "model.safetensors")
    assert weights.keys() == again.keys() and all((weights[name] == again[name]).all() for name in weights)
    assert rows(tmp_path / "outputs/train/killed") == rows(tmp_path / "alone")
    assert [row["step"] for row in rows(tmp_path / "alone")] == list(range(7))


def test_sigterm_ends_a_run_well(tmp_path: Path) -> None:
    run = start(tmp_path, *WORDS, "train.steps=1000", "hydra.run.dir=run")
    wait_for(tmp_path, "run/checkpoints/step_000002/COMPLETE", run)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate()
    assert run.returncode == 0, said
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "interrupted" and 2 <= summary["step"] < 1000
    assert (tmp_path / f"run/checkpoints/step_{summary['step']:06d}/COMPLETE").exists()
