"""`grpo train engine=ray` as it is typed, with workers, Ray and the run itself killed in the middle."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import ROOT, Forked

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]
WORDS = (
    *("n=8", "m=4", "train.prompts=4", "train.steps=5", "train.checkpoint_every=1", "record.rollouts=-1"),
    *("logger=jsonl", "eval.every=100", "eval.problems=4", "eval.k=1", "sampler=infinite", "sampler.slots=8"),
)
RAY = ("engine=ray", "engine.workers=2", "engine.threads=1")
# Metrics that tell of time, memory and who did what; all others must agree.
OF_THE_WAY = ("engine/", "time/", "clock/", "memory/", "speed/")


def started(run: Path, *words: str) -> Forked:
    place = () if f"resume={run}" in words else (f"hydra.run.dir={run}",)
    return Forked("train", *WORDS, *words, *place, cwd=run.parent, env={"PYTHONPATH": str(ROOT)})


def ended(run: Path, *words: str) -> str:
    process = started(run, *words)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    return said


def rows(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def told(run: Path) -> Any:
    metrics = [{name: x for name, x in row.items() if not name.startswith(OF_THE_WAY)} for row in rows(run)]
    return metrics, (run / "rollouts.jsonl").read_bytes()


def killed_at(run: Path, step: int, which: str | None, number: int = signal.SIGKILL, *words: str) -> tuple[str, Any]:
    """Return what a run prints that gets a signal after `step` steps, or whose workers named `which` get it, and all
    its processes."""
    process = started(run, *RAY, *words)
    while len(rows(run)) <= step:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    own = psutil.Process(process.pid)
    family = [own, *own.children(recursive=True)]
    os.kill(next(one.pid for one in family if which is None or which in one.name()), number)
    return process.communicate()[0], family


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by the engine of one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    ended(run)
    return run


def test_a_killed_worker_changes_no_episode(tmp_path):
    """Workers draw one turn of everybody in a round; the engine of one process answers in place."""
    words = ("task=guess", "sampling.max_turn_tokens=4")
    said, _ = killed_at(tmp_path / "ray", 2, "ray::RolloutWorker", signal.SIGKILL, *words)
    ended(tmp_path / "alone", *words)
    assert "completed at step 5" in said
    summary = json.loads((tmp_path / "ray" / "summary.json").read_text())
    assert summary["engine"]["invariant"] and len(summary["engine"]["workers"]) == 2
    assert told(tmp_path / "ray")[1] == told(tmp_path / "alone")[1]
    assert [row["turns/mean"] for row in rows(tmp_path / "ray")[1:]][0] > 1


def test_when_ray_is_gone_the_run_fails_truthfully_and_goes_on_later(tmp_path, left_alone):
    run = tmp_path / "run"
    said, _ = killed_at(run, 2, "raylet")
    assert "Ray itself has ended" in said and "grpo train resume=auto" in said
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "failed" and "Ray itself has ended" in summary["error"]
    assert "completed at step 5" in ended(run, *RAY, "engine.workers=1", f"resume={run}")
    assert told(run) == told(left_alone)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_a_run_ends_its_workers(tmp_path, number):
    """But for Ray's agents, which look for their node once in a while."""
    run = tmp_path / "run"
    said, family = killed_at(run, 2, None, number)
    left = psutil.wait_procs([one for one in family if "Agent" not in name_of(one)], timeout=60)[1]
    assert not [one for one in left if "Agent" not in name_of(one)]
    if number == signal.SIGTERM:
        assert "SIGTERM: stopping, and saving what is finished" in said
        assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
        assert not list(Path("/tmp").glob(f"grpo_ray_{family[0].pid}_*"))


def name_of(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return str(process.name())
    return "Agent or gone"


def test_a_run_joins_a_cluster_that_asks_for_a_token(tmp_path, left_alone, monkeypatch):
    for name, value in (("AUTH_MODE", "token"), ("AUTH_TOKEN", secrets.token_hex(32)), ("USAGE_STATS_ENABLED", "0")):
        monkeypatch.setenv(f"RAY_{name}", value)
    # Not here: what is in Ray's environment when it is imported would be so for this process's other tests.
    asked = [sys.executable, "-c", "from ray.util import get_node_ip_address; print(get_node_ip_address())"]
    with socket.create_server(("", 0)) as listening:
        port = listening.getsockname()[1]
    address, folder = f"{subprocess.check_output(asked, text=True).strip()}:{port}", Path(f"/tmp/grpo_{os.getpid()}")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"]
    command += [f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]  # sockets have short names
    head = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for number in range(60):  # the node takes seconds to come up
            run = tmp_path / f"run{number}"
            process = started(run, *RAY, f"engine.address={address}")
            said = process.communicate()[0]
            if process.returncode == 0:
                break
            assert "engine=ray cannot start" in said, said
    finally:
        family = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)
    assert told(run) == told(left_alone)


def test_no_cluster_is_an_error_of_one_sentence(tmp_path):
    """Something that is not Ray, which neither answers nor hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"engine.address=127.0.0.1:{listening.getsockname()[1]}"
        process = started(tmp_path / "run", "engine=ray", address)
        said = process.communicate()[0]
    assert process.returncode == 2 and "Traceback" not in said, said
    assert said.splitlines()[-1].startswith("error: engine=ray cannot start 1 workers"), said
