"""Killable workers: who hangs is killed and reaped, who dies is named, and nobody else's reply is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from grpo_cli.support.errors import UserError
from grpo_cli.tasks import workers as module
from grpo_cli.tasks.workers import LATE, Workers, _end_own

SCRIPT = """
import json, os, sys, time
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[-1]))
reply = {"ready": True}
while True:
    pipe.send_bytes(json.dumps(reply).encode())
    question = json.loads(pipe.recv_bytes())
    if "hang" in question:
        time.sleep(600)
    if "die" in question:
        os._exit(3)
    if "fail" in question:
        pipe.send_bytes(b'{"died": "OSError: broken"}')
        sys.exit(1)
    reply = {"twice": 2 * question["x"], "pid": os.getpid()}
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(module, "SCRIPT", path)
    return path


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() == before


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_workers_answer_in_order_and_are_kept_and_no_more_are_started_than_asked(script: Path) -> None:
    workers, before = Workers("", 2, 30.0), children()
    assert workers.ask([]) == [] and children() == before
    pids = {reply["pid"] for _ in range(3) for reply in workers.ask([{"x": 1}])}
    assert len(pids) == 1 and children() - before == pids
    assert [reply["twice"] for reply in workers.ask([{"x": x} for x in range(50)])] == [2 * x for x in range(50)]
    assert len(children() - before) == 2
    assert os.getsid(pids.pop()) != os.getsid(0), "ctrl-C at the terminal does not reach it"
    _end_own(workers._workers, os.getpid() + 1)  # as in a fork, whose number is not that of the owner
    assert len(children() - before) == 2
    workers.close()


def test_who_hangs_or_dies_is_reaped_and_replaced_and_nobody_else_s_reply_is_lost(script: Path) -> None:
    workers, before = Workers("", 2, 0.5), children()  # other tests of this process may have left some
    asked = [{"x": 1}, {"hang": 1}, {"x": 3}, {"die": 1}, {"fail": 1}, {"hang": 1}, {"x": 5}]
    died = {"died": "exit code 3"}, {"died": "OSError: broken"}
    replies = workers.ask(asked)
    assert [reply.get("twice", reply) for reply in replies] == [2, LATE, 6, *died, LATE, 10]
    assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in children() - before)
    workers.close()


def test_a_script_that_does_not_start_is_no_questions_fault(script: Path) -> None:
    script.write_text("import nothing_of_that_name")
    with pytest.raises(UserError, match="exit code 1"):
        Workers("", 1, 30.0).ask([{"x": 1}])


def test_an_interrupted_call_leaves_no_reply_to_the_next(script: Path) -> None:
    workers = Workers("", 2, 30.0)
    workers.ask([{"x": 0}] * 4)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        workers.ask([{"hang": 1}, {"x": 1}, {"hang": 1}])
    signal.signal(signal.SIGALRM, before)
    assert [reply["twice"] for reply in workers.ask([{"x": 2}, {"x": 3}])] == [4, 6]
    workers.close()


def test_nothing_is_left_when_the_program_ends(script: Path) -> None:
    program = (
        "import sys\nfrom grpo_cli.tasks import workers as module\nmodule.SCRIPT = sys.argv[1]\n"
        "workers = module.Workers('', 2, 30.0)\n"
        "print(*{reply['pid'] for reply in workers.ask([{'x': 1}] * 20)})\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() and not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split())
