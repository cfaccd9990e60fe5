"""Killable workers: who hangs is killed and reaped, who dies is named, and nobody else's reply is lost.

The process that compares expressions runs with a stand-in for math-verify, which writes down what is asked of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
from judging import patient

from grpo_cli.support.errors import UserError
from grpo_cli.tasks import worker
from grpo_cli.tasks import workers as module
from grpo_cli.tasks.workers import LATE, Workers, _end_own

SCRIPT = """
import json, os, signal, sys, time
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[-1]))
reply = {"ready": True}
while True:
    pipe.send_bytes(json.dumps(reply).encode())
    question = json.loads(pipe.recv_bytes())
    if "interrupt" in question:
        os.kill(os.getppid(), signal.SIGALRM)
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
    monkeypatch.setattr(module.Worker, "ask", patient(lambda question: "hang" in question))
    return path


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


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


def test_who_hangs_or_dies_is_reaped_and_replaced_and_nobody_else_s_reply_is_lost(script: Path) -> None:
    workers, before = Workers("", 2, 0.5), children()  # other tests of this process may have left some
    asked = [{"x": 1}, {"hang": 1}, {"x": 3}, {"die": 1}, {"fail": 1}, {"hang": 1}, {"x": 5}]
    died = {"died": "exit code 3"}, {"died": "OSError: broken"}
    replies = workers.ask(asked)
    assert [reply.get("twice", reply) for reply in replies] == [2, LATE, 6, *died, LATE, 10]
    assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in children() - before)


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
    try:
        with pytest.raises(KeyboardInterrupt):
            workers.ask([{"hang": 1}, {"x": 1}, {"hang": 1, "interrupt": 1}])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [reply["twice"] for reply in workers.ask([{"x": 2}, {"x": 3}])] == [4, 6]


def test_nothing_is_left_when_the_program_ends(script: Path) -> None:
    program = (
        "import sys\nfrom grpo_cli.tasks import workers as module\nmodule.SCRIPT = sys.argv[1]\n"
        "workers = module.Workers('', 2, 30.0)\n"
        "print(*{reply['pid'] for reply in workers.ask([{'x': 1}] * 20)})\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() and not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split())


GRAMMAR = """
import sys
from types import SimpleNamespace

from sympy import Symbol

ConversionConfig = NormalizationConfig = SimpleNamespace

def latex2sympy(text, **words):
    print(f"parse {text}", file=sys.stderr)
    if "unread" in text:
        raise Exception("I expected something else here")
    if "huge text" in text:
        raise MemoryError
    return Symbol(text)
"""
LIBRARY = """
import resource
import sys
from functools import lru_cache

RAISED = {"odd": ZeroDivisionError("of nothing"), "lost": KeyError("x")}
RAISED |= {"huge": MemoryError(), "deep": RecursionError()}

def note(event):
    print(event, file=sys.stderr)

@lru_cache
def reduced(text):
    note(f"reduce {text}")

def verify(reference, answer, **words):
    reduced(str(reference))
    print("a library that talks", flush=True)  # no reply; at once, as what `note` writes
    if str(answer) in RAISED:
        raise RAISED[str(answer)]
    note([resource.getrlimit(what)[0] for what in (resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_CPU)])
    return reference == answer
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "math_verify.py").write_text(LIBRARY)
    grammar = tmp_path / "latex2sympy2_extended"
    grammar.mkdir()
    (grammar / "__init__.py").touch()
    (grammar / "latex2sympy2.py").write_text(GRAMMAR)
    return tmp_path


def asked(library: Path, *questions: tuple[str, str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The replies to pairs of a reference and an answer, and what the library was asked to do."""
    pipe, there = Pipe()
    program = subprocess.Popen(
        [sys.executable, "-P", worker.__file__, "math", "30", str(there.fileno())],
        pass_fds=[there.fileno()],
        env={**os.environ, "PYTHONPATH": str(library)},
        stderr=subprocess.PIPE,
        text=True,
    )
    there.close()
    replies = [json.loads(pipe.recv_bytes())]
    for reference, answer in questions:
        pipe.send_bytes(json.dumps({"reference": reference, "answer": answer}).encode())
        replies.append(json.loads(pipe.recv_bytes()))
    pipe.close()
    events = program.communicate(timeout=60)[1].splitlines()
    assert program.returncode == 0
    return replies, events


def test_each_answer_is_compared_with_the_gold_one_and_what_fails_has_a_name(library: Path) -> None:
    found = {
        **{"a": {"equal": True}, "b": {"equal": False}, "unread": {"equal": False}},
        **{"odd": {"incomparable": "ZeroDivisionError: of nothing"}, "lost": {"incomparable": "KeyError: 'x'"}},
        **dict.fromkeys(("huge", "huge text"), {"limit": "MemoryError"}),
        "deep": {"limit": "RecursionError"},
    }
    assert asked(library, *(("a", word) for word in found))[0][1:] == [*found.values()]


def test_the_library_keeps_nothing_of_an_answer(library: Path) -> None:
    """Its caches kept numbers of many megabytes, until there was no memory for the comparisons that came after."""
    events = asked(library, ("a", "b"), ("a", "huge"), ("a", "b"))[1][3:]
    assert events.count("reduce a") == 3 and events.count("parse a") == 1  # the reference is the worker's own


def test_memory_and_processor_time_have_an_end_even_if_the_asker_has_gone(library: Path) -> None:
    memory, core, seconds = json.loads(asked(library, ("a", "b"))[1][-1])
    assert 0 < memory <= worker.MEMORY and core == 0
    assert 30 < seconds < 120  # the comparison's thirty, and what the start took
