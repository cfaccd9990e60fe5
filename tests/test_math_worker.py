"""The process that compares expressions, with a stand-in for math-verify that writes down what is asked of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.tasks import worker

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

def verify(gold, answer, **words):
    reduced(str(gold))
    print("a library that talks", flush=True)  # no reply; at once, as what `note` writes
    if str(answer) in RAISED:
        raise RAISED[str(answer)]
    note([resource.getrlimit(what)[0] for what in (resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_CPU)])
    return gold == answer
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
    """The replies to pairs of a gold answer and an answer, and what the library was asked to do."""
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
    for gold, answer in questions:
        pipe.send_bytes(json.dumps({"gold": gold, "answer": answer}).encode())
        replies.append(json.loads(pipe.recv_bytes()))
    pipe.close()
    events = program.communicate(timeout=60)[1].splitlines()
    assert program.returncode == 0
    return replies, events


def test_each_answer_is_compared_with_the_gold_one_and_what_fails_has_a_name(library: Path) -> None:
    found = {
        **{"a": {"equal": True}, "b": {"equal": False}, "unread": {"equal": False}},
        **{"odd": {"incomparable": "ZeroDivisionError: of nothing"}, "lost": {"incomparable": "KeyError: 'x'"}},
        **{
            "huge": {"limit": "MemoryError"},
            "deep": {"limit": "RecursionError"},
            "huge text": {"limit": "MemoryError"},
        },
    }
    assert asked(library, *(("a", word) for word in found))[0][1:] == [*found.values()]


def test_the_library_keeps_nothing_of_an_answer(library: Path) -> None:
    """Its caches kept numbers of many megabytes, until there was no memory for the comparisons that came after."""
    events = asked(library, ("a", "b"), ("a", "huge"), ("a", "b"))[1][3:]
    assert events.count("reduce a") == 3 and events.count("parse a") == 1  # the gold answer is the worker's own


def test_memory_and_processor_time_have_an_end_even_if_the_asker_has_gone(library: Path) -> None:
    memory, core, seconds = json.loads(asked(library, ("a", "b"))[1][-1])
    assert 0 < memory <= worker.MEMORY and core == 0
    assert 30 < seconds < 120  # the comparison's thirty, and what the start took
