"""What a person sees: lines when nobody watches a terminal, a view that fits when somebody does."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from grpo_cli.support import terminal
from grpo_cli.support.formatting import legible
from grpo_cli.tracking import console
from grpo_cli.tracking.console import ConsoleTracker, ending, step_line
from grpo_cli.types import Example, Record

METRICS = {
    "reward/mean": 0.5,
    "response/length_mean": 38.2,
    "response/truncated": 0.02,
    "policy/entropy": 0.2344,
    "speed/tokens_per_second": 5321.0,
    "time/step": 1.3,
    "time/rollout": 0.6,
    "time/update": 0.7,
    "memory/peak_bytes": 850e6,
}
EVAL = {"eval/accuracy": 0.71, "eval/accuracy_low": 0.66, "eval/accuracy_high": 0.76, "eval/problems": 100.0}


class Screen:
    """A tracker with a clock that the test sets, and its output."""

    def __init__(self, total: int, width: int = 80, **options: Any) -> None:
        self.now, self.file, self.examples = 0.0, io.StringIO(), tuple[Any, ...]()
        self.console = Console(file=self.file, width=width, record=True, **options)
        self.tracker = ConsoleTracker(total, Path("a b/R"), "n=8", self.console, lambda: self.now)

    def run(self, steps: Iterable[int], seconds: float, **evaluated: float) -> None:
        for step in steps:
            self.now += seconds
            self.tracker.log(Record(step, METRICS | {"reward/mean": step / 100} | evaluated, self.examples))

    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


def test_a_plain_line_holds_what_there_is():
    parts = ["step   7/200", "reward 0.500", "eval 0.710 (0.660 to 0.760, 71 of 100)", "length 38", "2% cut off"]
    expected = "  ".join([*parts, "entropy 0.234", "5.3k tokens/s", "1.30 s/step", "810.6 MiB peak", "4m07s left"])
    assert step_line(Record(7, {**METRICS, **EVAL}), 200, left=247.0) == expected
    assert step_line(Record(0, EVAL), 200, left=None) == "step   0/200  eval 0.710 (0.660 to 0.760, 71 of 100)"


def test_a_plain_run_prints_its_ends_every_evaluation_and_a_line_every_ten_seconds():
    screen = Screen(total=100, force_terminal=True, color_system=None)  # as with FORCE_COLOR: a file is no terminal
    for step in range(1, 101):
        screen.run([step], 0.5, **(EVAL if step == 33 else {}))
    screen.tracker.close(ENDED)
    steps = [int(line.split()[1].partition("/")[0]) for line in screen.lines() if line.startswith("step")]
    assert steps == [1, 21, 33, 53, 73, 93, 100]


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_live_view_fits_and_keeps_labels_and_what_comes_first(width):
    """The time left is that of the steps to come."""
    screen, text = Screen(1000, width), "[bold]resumed[/bold] at step 3 of /a/very/long/path " + "x" * 100
    screen.tracker.say(text)
    screen.tracker.warn(text)
    assert screen.lines() == [text, f"warning: {text}"]
    of = dict(prompt="3 + 4 =", answer="7", parts={}, length=1, finish="eos", kept=True, reason="kept", advantage=None)
    screen.examples = tuple(
        Example("a", i, reply=text, reward=1.0 - i, solved=not i, **of) for i, text in enumerate(["It is\n7.", "8"])
    )
    screen.run(range(1, 101), 2.0, **EVAL)
    screen.tracker.phase(("step", "rollout"))
    screen.now += 10.0
    screen.tracker.progress("rollout", 61, 256, 2440)
    screen.console.export_text()
    screen.console.print(screen.tracker)
    lines = [line.rstrip() for line in screen.console.export_text().splitlines()]
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("step 101/1000  30m00s left") and len(lines) == 10
    for label, value in (("reward", "1.000"), ("eval accuracy", "0.710"), ("right", "It is 7."), ("wrong", "8")):
        assert any(line.split(label)[-1].strip().startswith(value) for line in lines if line.startswith(label))


ENDED = {"status": "completed", "step": 200, "train_seconds": 231.7, "peak_bytes": 2**30, "stopped_by": None}
ENDED |= {"first_accuracy": 0.5, "final_accuracy": 0.71, "final_accuracy_step": 200}


def test_a_run_ends_with_what_can_be_typed_next():
    commands = [f"grpo {command} 'a b/R'" for command in ("show", "report", "export")]
    _, *lines = ending(ENDED, 200, Path("a b/R"), EVAL)
    assert all(word in line for word, line in zip(commands, lines, strict=True))
    stopped = {**ENDED, "status": "interrupted", "step": 7, "stopped_by": "SIGTERM"}
    assert "resume=R" in [*ending(stopped, 200, Path("R"), {})][-1]
    assert len([*ending({**stopped, "step": 0}, 200, Path("R"), {})]) == 2  # it has neither completions nor curves


def test_a_long_first_step_foresees_the_run_once_and_says_where_it_is_every_minute(monkeypatch):
    """A twentieth of 256 rollouts after 30 s: 10 minutes a step, more than 13 hours for 80."""
    monkeypatch.setattr(console, "TICK", 0.001)
    screen = Screen(80)
    tracker = screen.tracker
    tracker.phase(("step", "rollout"))
    for done, screen.now in ((1, 19.0), (2, 20.0), (13, 30.46875), (14, 31.0)):
        tracker.progress("rollout", done, 256)
    (line,) = screen.lines()
    assert "10m00s" in line and "13h20m" in line
    screen.now = 64.0
    while len(screen.lines()) < 2:
        time.sleep(0.001)
    tracker.close(ENDED)
    assert screen.lines()[1] == "step 1/80  rollout 14/256 1m04s, 18m26s left"


PRINTS = "from grpo_cli.support.terminal import console; c = console(); [c.print(line) for line in range(20_000)]"
WRITES = f"{PRINTS}; import sys; print('went on', file=sys.stderr)"


def test_a_program_goes_on_and_ends_well_without_a_reader() -> None:
    command = f"{sys.executable} -c {shlex.quote(WRITES)} | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "went on\n")


def test_a_screen_that_is_closed_from_the_start_costs_nothing() -> None:
    program = "from grpo_cli.support.terminal import outlive_the_reader as o; o(); print(1); print(2, file=sys.stderr)"
    assert subprocess.run(f'{sys.executable} -c "import sys; {program}" <&- >&- 2>&-', shell=True).returncode == 0


HOSTILE = "a\x1b[31mred\x1b[0m \x1b]0;title\x07b\x1b[2Jc\x9bd\u202ee\rf\x00"


def test_no_text_tells_the_terminal_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that a message quotes, a setting's name, a file's field and a library's report may hold such texts."""
    assert legible(HOSTILE + "\n\t") == "ared bc\ufffdd\ufffde\ufffdf\ufffd\n\t"
    monkeypatch.setenv("TERM", "xterm")
    printed, shown = io.StringIO(), io.StringIO()
    print(HOSTILE, file=terminal.Screen(printed))
    assert printed.getvalue() == "ared bc\ufffdd\ufffde\rf\ufffd\n"  # progress bars return to the line's beginning
    terminal.console(shown, force_terminal=True, width=60).print(f"[bold]{HOSTILE}", highlight=False)
    assert shown.getvalue() == "\x1b[1mared \ufffd]0;titlebc\ufffdd\ufffdef\ufffd\x1b[0m\n"  # rich takes the bell out
