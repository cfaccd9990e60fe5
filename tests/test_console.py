"""What a person sees: lines when nobody watches a terminal, a view that fits when somebody does."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from grpo_cli.tracking.console import (
    ConsoleTracker,
    RunView,
    ending,
    sparkline,
    step_line,
)
from grpo_cli.types import Record

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
EVAL = {"eval/accuracy": 0.71, "eval/accuracy_low": 0.66, "eval/accuracy_high": 0.76}


class Screen:
    """A tracker with a made-up clock, and what it wrote."""

    def __init__(self, total: int, terminal: bool = False, **options: Any) -> None:
        self.now = 0.0
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=terminal, width=80, **options)
        self.tracker = ConsoleTracker(total, self.console, clock=lambda: self.now)

    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()

    def view(self) -> str:
        with self.console.capture() as capture:
            self.console.print(self.tracker.view)
        return capture.get()


def test_a_plain_line_says_what_there_is() -> None:
    parts = ["step   7/200", "reward 0.500", "eval 0.710 (0.660 to 0.760)", "length 38", "2% cut off"]
    expected = "  ".join([*parts, "entropy 0.234", "5.3k tokens/s", "1.30 s/step", "811.0 MiB peak", "4m07s left"])
    assert step_line(Record(7, {**METRICS, **EVAL}), 200, left=247.0) == expected
    assert step_line(Record(0, {"eval/accuracy": 0.71}), 200, left=None) == "step   0/200  eval 0.710"
    counted = step_line(Record(0, {**EVAL, "eval/problems": 100.0}), 200, left=None)
    assert counted == "step   0/200  eval 0.710 (0.660 to 0.760, 71 of 100)"


@pytest.mark.parametrize(
    ("seconds", "last", "printed"), [(0.5, 1000, {1, 333, *range(10, 1001, 10)}), (11.0, 19, {*range(1, 20)})]
)
def test_a_plain_run_prints_about_a_hundred_lines_and_every_evaluation_and_every_slow_step(
    seconds: float, last: int, printed: set[int]
) -> None:
    screen = Screen(total=1000)
    for step in range(1, last + 1):
        screen.now += seconds
        screen.tracker.log(Record(step, METRICS | (EVAL if step == 333 else {})))
    screen.tracker.close({"status": "finished"})
    steps = [int(line.split()[1].partition("/")[0]) for line in screen.lines() if line.startswith("step")]
    assert steps == sorted(printed)


def test_a_plain_line_is_neither_wrapped_nor_coloured_nor_read_as_markup() -> None:
    screen = Screen(total=10)
    text = "[bold]resumed[/bold] at step 3 of /a/very/long/path " + "x" * 100
    screen.tracker.say(text)
    screen.tracker.warn(text)
    assert screen.lines() == [text, f"warning: {text}"]


def test_the_time_left_is_that_of_the_steps_to_come() -> None:
    screen = Screen(total=110)
    for step in (100, 101, 102):
        screen.now += 3.0
        screen.tracker.log(Record(step, METRICS))
    assert screen.tracker.view.seconds_left() == pytest.approx(8 * 3.0)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_live_view_fits_and_keeps_labels_and_what_comes_first(width) -> None:
    now = 0.0
    view = RunView(1000, clock=lambda: now)
    for step in range(1, 101):
        now += 2.0
        view.add(Record(step, {**METRICS, **EVAL, "reward/mean": step / 100}))
    view.phase(("step", "policy_logprobs"))
    lines = drawn(view, width)
    assert max(map(len, lines)) <= width
    starts = [
        "step 100/1000  30m00s left  policy_l",
        "reward         1.000  ▁",
        "eval accuracy  0.710",
        "completions    length 38",
    ]
    starts += [
        "policy         entropy 0.234",
        "speed          5.3k",
        "memory         811.0 MiB",
        "time           update 0.7",
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


def drawn(view: RunView, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(view)
    return [line.rstrip() for line in console.export_text().splitlines()]


ENDED = {"status": "completed", "step": 200, "train_seconds": 231.7, "peak_bytes": 2**30, "stopped_by": None}
ENDED |= {"final_accuracy": 0.71, "final_accuracy_step": 200, "best_accuracy": 0.75}


def test_a_run_ends_with_a_sentence_and_where_it_is() -> None:
    first, second = ending(ENDED, 200, Path("a b/R"), "0.660 to 0.760, 71 of 100")
    for part in ("completed at step 200 of 200", "accuracy 0.710 (0.660 to 0.760, 71 of 100)", "best 0.750", "3m52s"):
        assert part in first
    assert "grpo show 'a b/R'" in second and "grpo report 'a b/R'" in second


def test_a_sparkline_spans_its_own_range() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert sparkline([float("nan")]) == ""
