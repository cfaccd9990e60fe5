"""A run killed without warning goes on as if nothing had happened: whole programs, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

WORDS = [
    "logger=jsonl",
    "n=4",
    "train.prompts=2",
    "train.steps=6",
    "train.checkpoint_every=2",
    "eval.every=0",
    "sampling.max_new_tokens=12",
]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "grpo_cli", "train", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(folder: Path, what: str, process: subprocess.Popen[str]) -> None:
    """Until a file or folder is there. The limit is a guard against hanging, not part of what is tested."""
    for _ in range(1200):
        if list(folder.glob(what)):
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    raise AssertionError(f"{what} did not appear in {folder}")


# The run that is to be killed waits in its third step (the first call is the rehearsal's) while there is a file `hold`,
# so that it cannot end before.
HELD = """
import itertools, pathlib, time
from grpo_cli.advantage import grpo

calls = itertools.count(1)

def advantage(kept_rewards, group_rewards, **settings):
    while next(calls) > 5 and pathlib.Path("hold").exists():
        time.sleep(0.05)
    return grpo(kept_rewards, group_rewards, **settings)
"""


@pytest.mark.slow
def test_kill_9_and_resume_equals_a_run_left_alone(tmp_path: Path) -> None:
    alone = start(tmp_path, *WORDS, "hydra.run.dir=alone")
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    killed = start(tmp_path, *WORDS, "hydra.run.dir=outputs/train/killed", "advantage._target_=held.advantage")
    wait_for(tmp_path, "outputs/train/killed/checkpoints/step_000002/COMPLETE", killed)
    killed.kill()
    killed.communicate()
    (tmp_path / "hold").unlink()
    said, _ = alone.communicate()
    assert alone.returncode == 0, said
    resumed = start(tmp_path, "resume=auto")
    said, _ = resumed.communicate()
    assert resumed.returncode == 0, said
    assert "resumed at step 2," in said
    last = "checkpoints/step_000006"
    weights = load_file(tmp_path / "alone" / last / "model.safetensors")
    again = load_file(tmp_path / "outputs/train/killed" / last / "model.safetensors")
    assert weights.keys() == again.keys() and all((weights[name] == again[name]).all() for name in weights)
    rows = [json.loads(line) for line in (tmp_path / "outputs/train/killed/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7))


@pytest.mark.slow
def test_sigterm_ends_a_run_well(tmp_path: Path) -> None:
    run = start(tmp_path, *WORDS, "train.steps=1000", "hydra.run.dir=run")
    wait_for(tmp_path, "run/checkpoints/step_000002/COMPLETE", run)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate()
    assert run.returncode == 0, said
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "interrupted" and 2 <= summary["step"] < 1000
    assert (tmp_path / f"run/checkpoints/step_{summary['step']:06d}/COMPLETE").exists()
