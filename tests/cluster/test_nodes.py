"""`engine=ray` in a cluster that was there before: two nodes, which ask for a token, of which one goes."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.cluster.test_whole_runs import WORDS, ended, rows, started, told

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
WORKERS = 4  # of which each node of two CPUs has two
LONGER = (*WORDS, "train.steps=40", "train.checkpoint_every=5")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        port: int = listening.getsockname()[1]
        return port


def node(*words: str) -> subprocess.Popen[bytes]:
    """A node of two CPUs, in a group of processes of its own."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2", *words]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, **quiet)


def end(node: subprocess.Popen[bytes]) -> None:
    """As a machine ends: all of its processes at once."""
    family = [node.pid]
    with suppress(psutil.NoSuchProcess):
        family += [child.pid for child in psutil.Process(node.pid).children(recursive=True)]
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.wait()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of two nodes, and the one that may go."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Not here: what is in Ray's environment when it is imported would be so for this process's other tests.
    asked = [sys.executable, "-c", "from ray.util import get_node_ip_address; print(get_node_ip_address())"]
    address = f"{subprocess.check_output(asked, text=True).strip()}:{free_port()}"
    folder = Path(f"/tmp/grpo_nodes_{os.getpid()}")  # sockets have short names
    head = node("--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false", f"--temp-dir={folder}")
    while subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "status", f"--address={address}"]).returncode:
        time.sleep(1)
    other = node(f"--address={address}")
    try:
        yield address, other
    finally:
        end(other)
        end(head)
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_a_node_that_goes_ends_the_run_which_goes_on_with_the_others(tmp_path, cluster):
    address, other = cluster
    run, alone = tmp_path / "run", tmp_path / "alone"
    asked = ("engine=ray", f"engine.address={address}", "engine.threads=1", "engine.timeout=60")
    process = started(run, *LONGER, *asked, f"engine.workers={WORKERS}")
    while len(rows(run)) < 10:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    end(other)
    said = process.communicate()[0]
    assert process.returncode == 2 and "engine=ray" in said.splitlines()[-1], said
    ended(run, *LONGER, *asked, "engine.workers=2", f"resume={run}")
    ended(alone, *LONGER)
    assert told(run) == told(alone)
