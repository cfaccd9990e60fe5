"""Whole sweeps: real training runs in processes of their own, one killed in the middle, resumed and finished."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from processes import ROOT, Forked
from typed import done, grpo, refused

from grpo_cli.runs.lock import sole_use
from grpo_cli.support.errors import UserError
from grpo_cli.sweep import resume
from grpo_cli.sweep.gpus import chosen_gpus, places, visible_gpus
from grpo_cli.sweep.pool import failure

SMALL = (
    "train.prompts=1 n=2 m=2,4 sampling.max_new_tokens=4 eval.every=0 train.steps=6 train.checkpoint_every=1".split()
)
SMALL += "advantage._target_=held.advantage logger=jsonl device=cpu hydra.sweep.dir=sweep hydra.launcher.jobs=2".split()
# The job with n=2 waits in its third step (the first call is the trial's) for as long as there is a file `hold`.
HELD = """
import itertools, pathlib, time
from grpo_cli.rules.advantage import grpo

calls = itertools.count(1)

def advantage(group, kept, **settings):
    while len(group.rollouts) == 2 and next(calls) > 3 and pathlib.Path("hold").exists():
        time.sleep(0.05)
    return grpo(group, kept, **settings)
"""


def start(cwd: Path, *arguments: str) -> Forked:
    # `python -m pytest` finds the package in the current folder, a process elsewhere does not.
    return Forked("train", "-m", *arguments, cwd=cwd, env={"PYTHONPATH": str(ROOT)}, joined=False)


def steps(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def test_a_sweep_survives_a_killed_job_and_is_finished_by_resuming_it(tmp_path):
    folders = [tmp_path / "sweep" / str(number) for number in range(2)]
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    process = start(tmp_path, *SMALL)
    while len(steps(folders[0])) <= 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    children = psutil.Process(process.pid).children()
    (job,) = (one for one in children if any(str(folders[0]) in word for word in one.cmdline()))
    job.kill()
    output, errors = process.communicate()
    assert (process.returncode, errors) == (1, ""), "one job has failed"
    assert "job 1  m=4: skipped  m=4 must not be more than n=2" in output and "2 jobs: 1 failed, 1 skipped" in output
    assert "grpo train -m resume=sweep hydra.sweep.dir=sweep" in output
    found = [json.loads((folder / "status.json").read_text()) for folder in folders]
    assert [status["state"] for status in found] == ["failed", "skipped"]
    assert failure(1, tmp_path / "gone") == "exit code 1, and nothing in the log"
    (tmp_path / "log.txt").write_text("error: the disk is full\nTraceback\nRuntimeError: new\n")
    assert failure(1, tmp_path, logged=len("error: the disk is full\n")) == "RuntimeError: new"
    assert found[0]["reason"].startswith("killed by signal 9") and steps(folders[0]) == [0, 1, 2]
    listed = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"]
    jobs = [(job["number"], job["folder"], job["overrides"][1:3]) for job in listed]
    assert jobs == [(0, "0", ["n=2", "m=2"]), (1, "1", ["n=2", "m=4"])]

    (tmp_path / "hold").unlink()
    process = start(tmp_path, "resume=sweep", "hydra.sweep.dir=sweep")
    output, errors = process.communicate()
    assert (process.returncode, errors) == (0, "") and "2 jobs: 1 done, 1 skipped" in output
    assert steps(folders[0]) == list(range(7)) and "resumed at step" in (folders[0] / "log.txt").read_text()
    assert json.loads((folders[0] / "summary.json").read_text())["status"] == "completed"
    assert [(folder / "run.json").exists() for folder in folders] == [True, False]


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Jobs that only say with what they would have been started, write `summary.json`, and fail if their seed is 13."""
    monkeypatch.chdir(tmp_path)
    started: list[list[str]] = []

    def command(self: resume.Sweep, job: Any) -> list[str]:
        started.append(real(self, job)[4:])
        ends = "exit 5" if "seed=13" in job.overrides else "exit 0"
        accuracy = "null" if "eval.every=0" in job.overrides else "0.5"
        summary = f'{{"status": "completed", "final_accuracy": {accuracy}}}'
        write = f"echo {shlex.quote(summary)} > {shlex.quote(str(job.folder))}/summary.json"
        return ["sh", "-c", f"[ '{ends}' = 'exit 0' ] && {write}; {ends}"]

    real = resume.Sweep.command_of
    monkeypatch.setattr(resume.Sweep, "command_of", command)
    return started


def test_a_job_is_started_as_one_would_by_hand_and_again_with_the_words_of_the_first_time(tmp_path, pretended):
    (tmp_path / "mine").mkdir()
    words = ["n=4,13", "seed=13", "m=${n}"]  # m with the value of the default config would be another
    of_hydra = ["hydra.sweep.dir=s", "hydra.job.chdir=false", "hydra.launcher.jobs=1"]
    assert grpo("train", "--config-dir", "mine", "-m", *words, *of_hydra).exit_code == 2
    place = [f"hydra.searchpath=['file://{tmp_path}/mine']", of_hydra[1], "hydra.job.num=0", "hydra.job.id=0"]
    *begin, m, last = pretended[0]
    assert begin == ["train", *place, "n=4", "seed=13"] and m.startswith("m=$")
    assert last == f"hydra.run.dir='{tmp_path}/s/0'"
    assert json.loads((tmp_path / "s" / "sweep.json").read_text())["overrides"] == words
    again = grpo("train", "--config-dir", "mine", "-m", "resume=sweep", *of_hydra[:2])
    assert again.exit_code == 2, again.output
    assert pretended[2:] == pretended[:2] and len(pretended) == 4


def test_a_wrong_value_ends_a_sweep_before_its_first_job(tmp_path, pretended):
    ended = grpo("train", "-m", "n=2,abc", f"hydra.sweep.dir={tmp_path}/sweep", "logger=jsonl")
    assert (ended.exit_code, ended.stderr) == (2, "error: n=abc must be a valid integer\n") and not pretended


def test_a_job_that_would_repeat_another_is_skipped(tmp_path, pretended):
    """Rules that keep 4 of 4 keep the same."""
    words = ["n=4", "m=2,4", "downsample=maxvar,random", "hydra.sweep.dir=s", "hydra.launcher.jobs=1", "logger=jsonl"]
    ended = grpo("train", "-m", *words)
    assert "m=4 downsample=random: skipped  it would repeat job 2" in ended.stdout and len(pretended) == 3


def test_a_sweep_that_is_stopped_says_how_to_go_on_and_ends_with_130(tmp_path, pretended, monkeypatch):
    """The first job presses ctrl-C, and runs until a signal stops it."""
    waits, own = "n=0; while [ $((n+=1)) -lt 2400 ]; do sleep 0.05; done", f"--config-dir={tmp_path}/mine"
    (tmp_path / "mine").mkdir()
    with monkeypatch.context() as patched:
        presses = ["sh", "-c", f"trap 'exit 0' TERM; kill -INT $PPID; {waits}"]
        patched.setattr(resume.Sweep, "command_of", lambda self, job: presses)
        result = grpo("train", "-m", own, "seed=1,2,3", "hydra.sweep.dir=s")
    assert result.exit_code == 130 and "SIGINT: stopping, and saving what is finished" in result.stdout
    assert f"1 done, 2 waiting\ngo on with: grpo train -m {own} resume=sweep hydra.sweep.dir=s\n" in result.stdout
    assert grpo("train", "-m", own, "resume=sweep", "hydra.sweep.dir=s").exit_code == 0
    assert [command[-2] for command in pretended] == ["seed=2", "seed=3"]
    for held, message in (("s/1", "job 1 of s is still running (process "), ("s", "s is in use by process ")):
        with sole_use(tmp_path / held, print):
            assert message in refused("train", "-m", own, "resume=sweep", "hydra.sweep.dir=s")
    path = tmp_path / "s" / "1" / "status.json"
    path.write_text(path.read_text().replace("seed=2", "seed=4"))
    assert "job 1 of s was seed=4 and would" in refused("train", "-m", own, "resume=sweep", "hydra.sweep.dir=s")


def test_only_missing_and_failed_jobs_are_run_by_resuming(tmp_path, pretended):
    """The exit code is the number of jobs that failed. A sweep that is there is refused and stays as it was."""
    first = grpo("train", "-m", "seed=13,1", "n=4,5", "m=4", "hydra.sweep.dir=s")
    assert first.exit_code == 2 and "4 jobs: 2 done, 2 failed" in first.stdout and "seed=1 n=4: done" in first.stdout
    pretended.clear()
    before = {path: path.read_bytes() for path in tmp_path.rglob("s/**/*.*")}
    assert "s already holds a sweep" in grpo("train", "-m", "seed=3,4", "hydra.sweep.dir=s").stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("s/**/*.*")} == before
    (tmp_path / "s" / "3" / "status.json").unlink()
    (tmp_path / "s" / "3" / "summary.json").unlink()
    (tmp_path / "s" / "0" / "checkpoints").mkdir()
    assert grpo("train", "-m", "resume=sweep", "hydra.sweep.dir=s").exit_code == 2
    again = [f"resume='{tmp_path}/s/0'", f"hydra.run.dir='{tmp_path}/s/1'", f"hydra.run.dir='{tmp_path}/s/3'"]
    assert [command[-1] for command in pretended] == again
    assert grpo("eval", "-m", "resume=sweep", "hydra.sweep.dir=s").exit_code == 2


@pytest.mark.parametrize(
    ("word", "way_out"),
    [
        ("hydra.launcher.jobs=0", "at least 1"),
        ("hydra.launcher.gpus=1", "such as [0,1]"),
        ("hydra.sweep.subdir=x", "would share"),
        ("hydra/launcher=slurm", "hydra/launcher=slurm"),
        ("n=range(0)", "at least one value"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused_before_it_writes_anything(pretended, word, way_out):
    message = refused("train", "-m", "seed=1,2", word, "hydra.sweep.dir=s")
    assert not list(Path().glob("s/*.json")) and pretended == []
    assert way_out in message and (word.partition("=")[0] in message or "values" in message)


@pytest.mark.filterwarnings("ignore")  # of Optuna's own imports
def test_optuna_s_best_run_is_that_of_the_greatest_accuracy(tmp_path, pretended):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ["hydra/sweeper=optuna", "seed=choice(13,1)", "hydra.sweeper.n_trials=4", "hydra.sweep.dir=s"]
    assert "4 jobs" in grpo("train", "-m", *words, "hydra.sweeper.sampler.seed=1").stdout
    best = yaml.safe_load((tmp_path / "s" / "optimization_results.yaml").read_text())
    assert (best["best_params"], best["best_value"]) == ({"seed": 1}, 0.5)


def test_gpus_memory_and_threads_are_dealt_out_and_a_gpu_that_is_not_there_is_refused(tmp_path, monkeypatch, pretended):
    """Threads unless their number is set."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    message = refused("train", "-m", "seed=1,2", "hydra.launcher.gpus=[7]", "hydra.sweep.dir=s")
    assert "GPU 7" in message and "leave hydra.launcher.gpus out" in message and pretended == []
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: X (UUID: GPU-a)\nGPU 1: X (UUID: GPU-b)'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert visible_gpus() == chosen_gpus(["0", "1"]) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-cc,3")
    assert visible_gpus() == chosen_gpus(["MIG-cc", "3"]) == ["MIG-cc", "3"]
    with pytest.raises(UserError, match=r"asks for GPU 0, .* there are MIG-cc, 3$"):
        chosen_gpus(["0"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    dealt = [(place["CUDA_VISIBLE_DEVICES"], place["GRPO_GPU_SHARE"]) for place in places(3, ["a", "b"], {})]
    assert dealt == [("a", "0.5"), ("b", "1.0"), ("a", "0.5")]
    assert [place["OMP_NUM_THREADS"] for place in places(3, [], {})] == ["2", "2", "2"]
    assert places(20, [], {})[0]["OMP_NUM_THREADS"] == "1"
    assert not {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"} & places(1, [], {})[0].keys()
    assert "OMP_NUM_THREADS" not in places(3, [], {"OMP_NUM_THREADS": "4"})[0]
    assert places(3, [], {"OMP_NUM_THREADS": "0"})[0]["OMP_NUM_THREADS"] == "2", "which libraries ignore"


def test_another_launcher_runs_jobs_as_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["train.steps=1", "train.prompts=1", "sampling.max_new_tokens=4", "eval.every=0", "logger=jsonl"]
    done("train", "-m", *small, "n=2,4", "hydra/launcher=basic", "hydra.sweep.dir=s")
    assert [steps(tmp_path / "s" / str(job)) for job in (0, 1)] == [[0, 1], [0, 1]]
