"""Killable workers: who hangs is killed and reaped, who dies is named, and nobody else's reply is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from grpo_cli.tasks.workers import WorkerDied, Workers, _end_own

SCRIPT = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if "hang" in question:
        time.sleep(600)
    if "die" in question:
        print("I cannot go on", file=sys.stderr)
        os._exit(3)
    print(json.dumps({"twice": 2 * question["x"], "pid": os.getpid()}), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(SCRIPT)
    return path


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_replies_come_in_the_order_of_the_questions_whoever_gave_them(script: Path) -> None:
    workers = Workers(script, 2, 30.0)
    replies = [reply for reply in workers.ask([{"x": x} for x in range(50)]) if reply]
    assert [reply["twice"] for reply in replies] == [2 * x for x in range(50)]
    assert workers.ask([]) == []
    workers.close()


def test_workers_are_kept_between_calls_and_no_more_are_started_than_asked(script: Path) -> None:
    workers, before = Workers(script, 2, 30.0), children()
    assert children() == before  # none before it is needed
    pids = {reply["pid"] for _ in range(3) for reply in workers.ask([{"x": 1}]) if reply}
    assert len(pids) == 1 and children() - before == pids
    workers.ask([{"x": 1}] * 4)
    assert len(children() - before) == 2
    workers.close()
    assert children() == before


def test_who_hangs_is_killed_reaped_and_replaced(script: Path) -> None:
    workers, before = Workers(script, 2, 0.5), children()
    replies = workers.ask([{"x": 1}, {"hang": 1}, {"x": 3}, {"hang": 1}, {"x": 5}])
    assert [reply and reply["twice"] for reply in replies] == [2, None, 6, None, 10]
    left = children() - before
    assert len(left) <= 2 and all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in left)
    workers.close()
    assert children() == before


def test_who_dies_is_named_with_its_last_words(script: Path) -> None:
    workers, before = Workers(script, 2, 30.0), children()
    with pytest.raises(WorkerDied) as caught:
        workers.ask([{"x": 1}, {"die": 1}, {"x": 3}])
    assert children() == before  # nor is anybody left who still answers questions of that call
    assert (caught.value.question, caught.value.reason) == (1, "exit code 3 (I cannot go on)")
    assert workers.ask([{"x": 4}])[0]["twice"] == 8  # type: ignore[index]
    workers.close()


def test_a_worker_that_goes_while_it_waits_is_nobodys_fault(script: Path) -> None:
    workers = Workers(script, 1, 30.0)
    (reply,) = workers.ask([{"x": 1}])
    assert reply is not None
    os.kill(reply["pid"], signal.SIGKILL)
    while psutil.pid_exists(reply["pid"]) and psutil.Process(reply["pid"]).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    (again,) = workers.ask([{"x": 2}])
    assert again is not None and again["twice"] == 4
    workers.close()


def test_a_script_that_does_not_start_is_no_questions_fault(tmp_path: Path) -> None:
    path = tmp_path / "worker.py"
    path.write_text("import nothing_of_that_name\n")
    with pytest.raises(WorkerDied, match="nothing_of_that_name") as caught:
        Workers(path, 1, 30.0).ask([{"x": 1}])
    assert caught.value.question is None


def test_neither_ctrl_c_nor_a_forks_end_reaches_a_worker(script: Path) -> None:
    workers = Workers(script, 1, 30.0)
    (reply,) = workers.ask([{"x": 1}])
    assert reply is not None and os.getsid(reply["pid"]) == reply["pid"]  # not the terminal's session
    _end_own(workers._workers, os.getpid() + 1)  # as in a fork, whose number is not that of the owner
    assert workers.ask([{"x": 2}]) == [{"twice": 4, "pid": reply["pid"]}]
    workers.close()


def test_nothing_is_left_when_the_program_ends(script: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\nfrom grpo_cli.tasks.workers import Workers\n"
        "workers = Workers(Path(sys.argv[1]), 2, 30.0)\n"
        "print(*{reply['pid'] for reply in workers.ask([{'x': 1}] * 20)})\n"
    )
    done = subprocess.run(
        [sys.executable, str(program), str(script)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() and not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split())
