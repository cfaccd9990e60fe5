"""What `grpo report` shows and leaves: the table and the pictures; from made-up runs and from real ones."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_report import launched, leave
from typer.testing import CliRunner

from grpo_cli.cli import main as cli
from grpo_cli.report.make import make
from grpo_cli.support.errors import UserError

HOSTILE = "<script>alert(1)</script><img src=http://example.org/x> [red]$a_b$ \x1b[31m"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two arms, with two seeds and with one; and one run of each kind that is not averaged."""
    folder = tmp_path / "runs"
    for i, (n, seed, last) in enumerate([(8, 0, 0.7), (8, 1, 0.9), (16, 0, 0.95)]):
        settings = {"n": n, "seed": seed, "train": {"steps": 20}}
        leave(folder / str(i), (0.5, 0.6, last), settings=settings, words=[f"n={n}"])
    leave(folder / "3", (0.5, 0.4), settings={"n": 16, "seed": 1, "train": {"steps": 20}}, status="failed")
    launched(folder / "4", "skipped", "m=32 must be at most n=16", ["n=16", "seed=2"])
    return folder


def reported(folder: Path, width: int = 200, terminal: bool = False, target: float | None = None) -> tuple[str, Path]:
    """What is printed, and the folder that is written."""
    screen = io.StringIO()
    make([folder], folder.parent / "out", target, console=Console(file=screen, width=width, force_terminal=terminal))
    return screen.getvalue(), folder.parent / "out"


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_the_terminal_shows_arms_and_apart_what_is_not_averaged(runs, without_matplotlib):
    screen, _ = reported(runs)
    lines = [line.split() for line in screen.splitlines()]
    # Student's interval of two seeds is 0.8 ± 12.7 * 0.14 / sqrt(2), cut to what an accuracy can be.
    assert ["8", "2", "0.800", "(0.000–1.000)", "0.800", "(0.000–1.000)", "never", "20.0", "s"] == lines[3][:9]
    assert lines[3][-1] == "▁▃▆"  # 0.5, 0.6 and 0.8 of 0.5 to 0.95, where the other arm ends
    assert "0.950 (0.100–0.900)*" in screen and "▁▃█" in screen
    assert "1 failed, 1 skipped" in screen
    apart = screen.partition("Not averaged:")[2]
    assert "RuntimeError: it broke" in apart and "m=32 must be at most n=16" in apart
    assert "10/20" in apart
    assert "Means over the 3 completed of 5 runs" in screen


def test_numbers_are_in_the_json_with_every_run_in_its_place(runs, without_matplotlib):
    screen, out = reported(runs, target=0.7)
    assert "pip install 'grpo-cli[plot]'" in screen
    told = json.loads((out / "report.json").read_text())
    first, second = told["arms"]
    assert (told["columns"], told["target_accuracy"], first["settings"]) == (["n"], 0.7, {"n": 8})
    assert first["final_accuracy"]["mean"] == pytest.approx(0.8)
    assert first["target"] == {"seconds": 20.0, "reached": 2, "never": 0}
    assert [run["averaged"] for run in first["runs"] + second["runs"]] == [True] * 3
    apart = [(run["state"], run["averaged"]) for run in second["not_averaged"]]
    assert apart == [("failed", False), ("skipped", False)]
    assert first["runs"][1]["curve"]["accuracy"] == [0.5, 0.6, 0.9]


def test_what_files_say_is_neither_markup_nor_escape_codes(tmp_path, without_matplotlib):
    for i in range(2):
        run = leave(tmp_path / "runs" / f"{i}<b>", settings={"_x<i>": HOSTILE + str(i)}, status=None)
        launched(run, "failed", HOSTILE)
    leave(tmp_path / "runs" / "3", settings={"_\x1b[2Jy": 1}, words=["\x1b[2Jz=1"])
    screen, _ = reported(tmp_path / "runs", terminal=True)
    assert "\x1b[31m\n" not in screen and "\x1b[2J" not in screen
    assert all(shown in screen for shown in ("[2Jy", "[31m", "[red]"))


def test_arms_of_which_too_much_differs_are_called_by_number(tmp_path, without_matplotlib):
    usual = {f"group.a_setting_with_a_long_name_{i}": i for i in range(4)}
    for i in range(3):
        change = {"group.a_setting_with_a_long_name_1": 9} if i == 1 else {}
        other = {"n": i} if i < 2 else {"n": 0, **{key: value + 5 for key, value in usual.items()}}
        leave(tmp_path / "runs" / str(i), settings=usual | other | change, status="completed" if i else "failed")
    screen, out = reported(tmp_path / "runs", width=80, terminal=True)
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", screen).split())
    assert "arm 2: group.a_setting_with_a_long_name_0=0 group.a_setting_with_a_long_name_1=9" in text


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_more_arms_than_colours_and_runs_without_numbers_can_be_drawn(tmp_path, status):
    pytest.importorskip("matplotlib")
    for i in range(12):
        leave(tmp_path / "runs" / str(i), (0.5, 0.5 + i / 100, 0.6), settings={"n": i}, status=status)
    leave(tmp_path / "runs" / "12", {}, settings={"n": 12})
    leave(tmp_path / "runs" / "13", {7: 0.5}, settings={"n": 13})
    _, out = reported(tmp_path / "runs")
    assert all(
        (out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("accuracy", "memory", "step_time")
    )


def test_the_legend_names_the_highest_and_counts_the_rest():
    pytest.importorskip("matplotlib")
    from grpo_cli.report.curves import AXES, Curve
    from grpo_cli.report.plots import ArmLine, accuracy_figure

    def line(i: int) -> ArmLine:
        return ArmLine(f"_n=${i}", [Curve((0, 1), (0.5, i / 20), {axis: (0.0, 1.0) for axis in AXES})])

    figure = accuracy_figure([line(i) for i in range(12)], 0.5, "eval/accuracy")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    # A dollar would begin a formula, a leading underscore would hide the label.
    assert labels == [*(rf" _n=\${i}" for i in range(4, 12)), "target accuracy", "4 more, which end lower"]


def test_a_folder_that_cannot_be_written_is_named(runs, without_matplotlib):
    (runs.parent / "out").write_text("in the way")
    with pytest.raises(UserError, match="the report cannot be written to .*out .*: choose another --out"):
        reported(runs)


# The command


def grpo(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), prog_name="grpo")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["nowhere"], "nowhere is not a folder"), (["run", "--target", "95"], "--target=95"), ([], "missing argument")],
)
def test_the_command_refuses_what_it_cannot_do(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    leave(tmp_path / "run")
    result = grpo("report", *arguments)
    assert result.exit_code == 2 and said in result.stderr and not (tmp_path / "outputs").exists()


def test_the_command_reports_real_runs_as_their_summaries_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = "train.prompts=2 sampling.max_new_tokens=6 eval.problems=4 eval.k=1 logger=jsonl device=cpu".split()
    for i, words in enumerate([("n=2", "seed=0"), ("n=2", "seed=1"), ("n=3", "seed=0")]):
        result = grpo("train", *small, *words, "train.steps=2", "eval.every=1", f"hydra.run.dir=runs/{i}")
        assert result.exit_code == 0, result.output
    result = grpo("report", "runs")
    assert result.exit_code == 0, result.output
    (out,) = (tmp_path / "outputs" / "report").iterdir()
    told = json.loads((out / "report.json").read_text())
    assert (told["columns"], told["implied"]) == (["n"], {"m": "n"})
    for run in (run for arm in told["arms"] for run in arm["runs"]):
        summary = json.loads((Path(run["folder"]) / "summary.json").read_text())
        curve = run["curve"]["accuracy"]
        assert (curve[-1], max(curve)) == (summary["final_accuracy"], summary["best_accuracy"])
        assert (run["steps"], run["seconds"]) == (2, summary["train_seconds"])
        totals = [summary[name] for name in ("generated_tokens", "trained_tokens")]
        assert [run["generated_tokens"], run["trained_tokens"]] == totals
        assert run["curve"]["steps"] == [0, 1, 2]
    assert [len(arm["runs"]) for arm in told["arms"]] == [2, 1]
