"""A run killed without warning goes on as if nothing had happened: whole runs and programs, real signals."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Forked
from safetensors.torch import load_file
from typed import json_lines, lasting

from grpo_cli.config.compose import settings_of
from grpo_cli.experiment import build

WORDS = "logger=jsonl n=4 train.prompts=2 train.steps=6 train.checkpoint_every=2 eval.every=0".split()
WORDS += ["sampling.max_new_tokens=12"]


def trained(folder: Path, *words: str) -> dict[str, Any]:
    """What a run in this process came to."""
    return build(settings_of(*WORDS, "train.steps=2", f"run_dir={folder}", *words)).fit()


def rows(folder: Path) -> list[dict[str, object]]:
    """The records of a run without what differs from one run of the same to the next."""
    return [*map(lasting, json_lines(folder / "metrics.jsonl"))]


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
    ends = (tmp_path / run / "checkpoints" / last.name for run in ("alone", "cut"))
    alone, again = (load_file(next(end.glob("*model.safetensors"))) for end in ends)
    assert alone.keys() == again.keys() and all(torch.equal(alone[key], again[key]) for key in alone)


# The run that is to be killed waits while there is a file `hold`, so that it cannot end before: in its third step (the
# first call is the trial's), or in the middle of that step's rollouts, as one is to take a slot that has fallen free.
SAVED = 'saved = pathlib.Path("outputs/train/killed/checkpoints/step_000002/COMPLETE")'
HELD = f"""
import pathlib, time
from grpo_cli.rules.advantage import grpo

{SAVED}

def advantage(group, kept, **settings):
    while saved.exists() and pathlib.Path("hold").exists():
        pathlib.Path("waiting").touch()
        time.sleep(0.05)
    return grpo(group, kept, **settings)
"""
HALFWAY = f"""
import pathlib, time
from grpo_cli.engine.scheduling import Fifo

{SAVED}

class Halfway(Fifo):
    def next(self, running):
        while saved.exists() and running and pathlib.Path("hold").exists():
            pathlib.Path("waiting").touch()
            time.sleep(0.05)
        return super().next(running)
"""
LATER = ("advantage._target_=held.advantage", HELD)
DURING = ("scheduler._target_=held.Halfway", HALFWAY)
PARTIAL = "collector=partial collector.max_lag=4 sampler=infinite sampler.slots=3 record.rollouts=-1 optim.lr=1e-3"


@pytest.mark.parametrize(
    ("words", "held"),
    [pytest.param("", LATER, id="plain"), pytest.param(PARTIAL, DURING, id="partial", marks=pytest.mark.process)],
)
def test_kill_9_and_resume_equals_a_run_left_alone(tmp_path, words, held):
    alone = Forked("train", *WORDS, *words.split(), "hydra.run.dir=alone", cwd=tmp_path)
    (tmp_path / "held.py").write_text(held[1])
    (tmp_path / "hold").touch()
    killed = Forked("train", *WORDS, *words.split(), "hydra.run.dir=outputs/train/killed", held[0], cwd=tmp_path)
    while not (tmp_path / "waiting").exists():
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.02)
    killed.kill()
    killed.communicate()
    (tmp_path / "hold").unlink()
    printed, _ = alone.communicate()
    assert alone.returncode == 0, printed
    resumed = Forked("train", "resume=auto", cwd=tmp_path)
    printed, _ = resumed.communicate()
    assert resumed.returncode == 0 and "resumed at step 2 " in printed, printed
    folders = tmp_path / "alone", tmp_path / "outputs/train/killed"
    weights, again = (load_file(folder / "checkpoints/step_000006/model.safetensors") for folder in folders)
    assert weights.keys() == again.keys() and all((weights[name] == again[name]).all() for name in weights)
    ours, theirs = map(records, folders)
    assert ours[0] == theirs[0] and [row["step"] for row in ours[0]] == list(range(7))
    if words == PARTIAL:
        assert ours[0][2]["collect/carried_tokens"], "the checkpoint holds some"
        assert ours[1] == theirs[1]
