"""Run folders to a report: what is read, what differs, who is averaged, with which interval, and what is shown."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import made
import pytest
from rich.cells import cell_len
from rich.console import Console
from typed import done

from grpo_cli.report.compare import Comparison, compare, estimate
from grpo_cli.report.curves import curve_of, interval, mean_curve
from grpo_cli.report.make import make, training_runs
from grpo_cli.report.overview import in_files, overview
from grpo_cli.report.read import GREEDY, Run, State, read_all, read_rows, read_run
from grpo_cli.report.tables import Table, arm_table, print_table
from grpo_cli.runs.lock import sole_use
from grpo_cli.support import terminal
from grpo_cli.support.errors import UserError


def rows_of(accuracies: Mapping[int, float], steps: int, seconds_per_step: float = 1.0) -> list[dict[str, Any]]:
    """A run's records, every step alike: one second, 100 tokens generated and 25 trained."""
    rows: list[dict[str, Any]] = []
    for step in range(steps + 1):
        row: dict[str, Any] = {"step": step}
        if step:
            row |= {"clock/train_seconds": seconds_per_step * step, "memory/peak_bytes": 2.0**20 * step}
            row |= {"tokens/generated": 100.0 * step, "tokens/trained": 25.0 * step}
        if step in accuracies:
            row |= {"eval/accuracy": accuracies[step], "eval/accuracy_low": 0.1, "eval/accuracy_high": 0.9}
        rows.append(row)
    return rows


def lines_of(*rows: Mapping[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def leave(
    folder: Path,
    accuracies: Mapping[int, float] | Sequence[float] = (0.5, 0.75),
    *,
    settings: Mapping[str, Any] | None = None,
    choices: Mapping[str, str] | None = None,
    words: Sequence[str] = (),
    status: str | None = "completed",
    seconds_per_step: float = 1.0,
) -> Path:
    """What a run leaves that was evaluated at these steps (0, 10, 20, ... where none are given)."""
    if not isinstance(accuracies, Mapping):
        accuracies = {10 * i: accuracy for i, accuracy in enumerate(accuracies)}
    made.record(folder, {"seed": 0, **(settings or {})}, words, choices)
    (folder / "metrics.jsonl").write_text(lines_of(*rows_of(accuracies, max(accuracies, default=0), seconds_per_step)))
    if status is not None:
        error = "RuntimeError: it broke" if status == "failed" else None
        (folder / "summary.json").write_text(json.dumps({"status": status, "error": error, "train_seconds": 1.0}))
    return folder


def launched(folder: Path, state: str, reason: str | None = None, words: Sequence[str] = ()) -> None:
    """The launcher's record of a job."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps({"state": state, "reason": reason, "overrides": list(words)}))


def runs_in(*folders: Path, metric: str = GREEDY) -> list[Run]:
    return training_runs(read_all(folders, metric), folders, metric)


def compared(folder: Path, **words: Any) -> Comparison:
    return compare(runs_in(folder), **words)


def reported(folder: Path, **asked: Any) -> tuple[str, dict[str, Any]]:
    """What is printed, and the numbers that are written."""
    screen = io.StringIO()
    make([folder], folder.parent / "out", console=Console(file=screen, width=200), **asked)
    return screen.getvalue(), json.loads((folder.parent / "out" / "report.json").read_text())


def test_a_run_is_read_as_it_was_written_and_nothing_in_it_is_executed(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "read")
    settings = {"seed": 7, "n": 8, "m": "${n}", "x": "${oc.env:SECRET}"}
    run = read_run(leave(tmp_path, (0.25, 0.5, 0.375), settings=settings, seconds_per_step=2.0), "a")
    assert (run.state, run.reason, run.recorded.seed, run.notes) == (State.COMPLETED, "", 7, ())
    assert run.curve.steps == (0, 10, 20) and run.curve.axes["clock/train_seconds"] == (0.0, 20.0, 40.0)
    assert (run.final_accuracy, run.curve.intervals[-1]) == (0.375, (0.1, 0.9))
    assert (run.steps, run.seconds, run.generated_tokens, run.trained_tokens) == (20, 40.0, 2000.0, 500.0)
    assert run.peak_bytes == 20 * 2**20
    assert (run.recorded.settings["m"], run.recorded.settings["x"]) == (8, "${oc.env:SECRET}")


def test_a_file_that_ends_anywhere_loses_its_last_line_at_most(tmp_path):
    whole, path = lines_of(*rows_of({0: 0.5}, 1)).encode(), tmp_path / "metrics.jsonl"
    for cut in range(len(whole) + 1):
        path.write_bytes(left := whole[:cut])
        found, notes = read_rows(path)
        complete = left.count(b"\n") + left.endswith(b"}")  # only the newline is missing
        assert [row["step"] for row in found] == list(range(complete))
        assert bool(notes) == (cut > 0 and not left.endswith((b"\n", b"}")))


def test_lines_that_are_no_records_or_were_written_anew_are_left_out(tmp_path):
    """A resumed process wrote steps 2 and 3 anew and stopped before the first one's steps 4 and 5."""
    rows = [{"step": step, "x": 0.0} for step in range(6)] + [{"step": 2, "x": "-Infinity"}, {"step": 3, "x": 1.0}]
    odd = ["not json", "[1]", '{"x": 1}', '{"step": "NaN"}', "[" * 100_000, '{"step": 1, "x": null}']
    (tmp_path / "metrics.jsonl").write_text(lines_of(*rows) + "\n".join(odd))
    found, notes = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["x"]) for row in found] == [(0, 0.0), (1, 0.0), (2, -math.inf), (3, 1.0)]
    assert notes == ["metrics.jsonl: lines left out that cannot be read: 6, the first is line 9"]


@pytest.mark.parametrize(
    ("status", "summary", "state", "reason"),
    [
        (None, "interrupted", State.INTERRUPTED, ""),
        (None, "failed", State.FAILED, "RuntimeError: it broke"),
        (None, None, State.UNFINISHED, "no summary.json, and no process is at it"),
        (("failed", "killed by signal 9"), "completed", State.COMPLETED, ""),  # by hand, after its sweep
        (("failed", "signal\n9\x1b[31m"), None, State.FAILED, "signal 9\N{REPLACEMENT CHARACTER}[31m"),
        (("running", None), "interrupted", State.INTERRUPTED, ""),
        (("skipped", "m > n"), None, State.SKIPPED, "m > n"),
    ],
)
def test_how_a_run_ended_is_the_launcher_s_word_before_the_run_s_own(tmp_path, status, summary, state, reason):
    run = leave(tmp_path / "0", status=summary)
    if status:
        launched(run, *status)
    found = read_run(run, "0")
    assert (found.state, found.reason) == (state, reason)
    with sole_use(run, print):
        assert read_run(run, "0").state == State.RUNNING
    with sole_use(tmp_path, print):  # its launcher, before it has loaded
        assert (read_run(run, "0").state == State.RUNNING) == (status == ("running", None))


def test_runs_are_found_below_any_folder_once_and_jobs_come_in_order(tmp_path):
    """Also those that have not begun, with what they will run."""
    for name in ("sweep/10", "sweep/9", "sweep/2/", "train/b", "train/a"):
        leave(tmp_path / name)
    leave(tmp_path / "train/a/checkpoints/step_000001")  # below a run nothing is looked for
    found = runs_in(tmp_path, tmp_path / "sweep" / "9")
    names = ["sweep/2", "sweep/9", "sweep/10", "train/a", "train/b"]
    assert [run.name for run in found] == [f"{tmp_path.name}/{name}" for name in names]
    assert [run.name for run in runs_in(tmp_path / "sweep" / "9")] == ["9"]
    jobs = [{"number": i, "folder": f"/moved/from/{i}", "overrides": [f"n={i}"]} for i in (9, 16)]
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"overrides": ["n=9,16"], "jobs": jobs}))
    first, second, *_ = runs_in(tmp_path / "sweep")
    assert (first.name, first.state, second.name, second.state) == ("9", State.COMPLETED, "16", State.WAITING)
    assert second.recorded.settings == {"n": "16"}


def test_evaluations_alone_are_shown_side_by_side(tmp_path, capsys):
    """By what differs in their settings; the first made no search, so that it has none to show."""
    greedy = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.25, "eval/accuracy_high": 0.75, "eval/length_mean": 18.4}
    found = {"search/accuracy": 0.625, "search/tokens": 1264.0}
    for name, summary in {"none": greedy, "majority": greedy | found}.items():
        made.record(tmp_path / name, {}, choices={"search": name}, command="eval")
        (tmp_path / name / "summary.json").write_text(json.dumps({"status": "completed", **summary}))
    made.record(tmp_path / "other", {}, choices={"search": "none"}, command="eval")
    (tmp_path / "other" / "summary.json").write_text("{")
    assert make([tmp_path], tmp_path / "out") is None and not (tmp_path / "out").exists()
    printed = capsys.readouterr().out
    assert "other: unfinished; no summary.json, and no process is at it; summary.json cannot be read" in printed
    shown = [" ".join(line.split()) for line in printed.splitlines() if "search" in line]
    assert shown == [
        "evaluation search greedy tokens tokens of a reply",
        "search=majority 0.625 0.500 [0.250, 0.750] 1,264 18",
        "search=none – 0.500 [0.250, 0.750] – 18",
    ]
    with pytest.raises(UserError, match="no training run in or below"):
        runs_in(tmp_path)


def test_columns_are_what_differs_and_a_choice_or_a_typed_word_speaks_for_what_differs_along(tmp_path):
    """Names are no difference."""
    for i, (name, n, slots) in enumerate([("full", 8, None), ("infinite", 16, 16), ("infinite", 16, 32)]):
        settings = {"n": n, "m": "${n}", "sampler": {"_target_": name} | ({"x": slots} if slots else {})}
        names = {"seed": i, "run_dir": f"{i}", "logger": {"name": f"run {i}"}}
        leave(tmp_path / "a" / str(i), settings=settings | names, choices={"sampler": name})
        words = [f"m={n // 2}", f"experiment={name}"]
        leave(tmp_path / "b" / str(i), settings={"n": n, "m": n // 2}, choices={"experiment": name}, words=words)
        if i == 1:
            found = compared(tmp_path / "a")
            assert (found.columns, found.also) == (("sampler",), ("n", "m", "sampler._target_", "sampler.x"))
    found = compared(tmp_path / "a")
    assert (found.columns, found.arms[-1].label) == (("sampler", "sampler.x"), "sampler=infinite sampler.x=32")
    assert (compared(tmp_path / "b").columns, compared(tmp_path / "b").also) == (("m", "experiment"), ("n",))


def test_runs_that_differ_only_in_their_seed_are_one_arm(tmp_path):
    """And in what was chosen for the memory of their machines."""
    for seed, accuracy in enumerate((0.8, 0.9, 1.0)):
        settings = {"seed": seed, "train": {"micro_batch_tokens": 512 * seed}, "sampler": {"slots": seed}}
        words, chosen = ["train.micro_batch_tokens=auto", "fit=auto"], {"sampler": ("full", "infinite")[seed % 2]}
        leave(tmp_path / str(seed), (0.5, accuracy), settings=settings | {"fit": "auto"}, choices=chosen, words=words)
    (arm,) = compared(tmp_path).arms
    final = arm.final_accuracy
    for file in tmp_path.glob("[12]/metrics.jsonl"):  # seeds that agree are not certainty: an evaluation's interval
        file.write_text((tmp_path / "0/metrics.jsonl").read_text())
    found = compared(tmp_path).arms[0].final_accuracy
    assert (found.mean, found.low, found.high) == (pytest.approx(0.8), 0.1, 0.9) and found.over == "problems"
    # Student's quantile with two degrees of freedom is 4.3027: 4.3027 * 0.1 / sqrt(3) = 0.2484
    assert (final.mean, final.low, final.over) == (pytest.approx(0.9), pytest.approx(0.6516, abs=1e-4), "seeds")
    assert (final.high, arm.label) == (1.0, "all runs"), "an accuracy is at most 1"


def test_arms_are_compared_seed_by_seed_with_the_one_that_is_named(tmp_path):
    """Differences 0.1, 0.2 and 0.3 though each arm's spread is larger: 0.2 ± 4.3027 * 0.1 / sqrt(3)."""
    last = {8: (0.2, 0.5, 0.6), 16: (0.3, 0.7, 0.9), 32: (0.1,)}
    for n, accuracies in last.items():
        for seed, accuracy in enumerate(accuracies):
            leave(tmp_path / "runs" / f"{n}_{seed}", (0.1, accuracy), settings={"n": n, "seed": seed})
    screen, numbers = reported(tmp_path / "runs", base="n=8")
    found = {arm["settings"]["n"]: arm["difference"] for arm in numbers["arms"]}
    assert (found[16]["mean"], found[16]["low"]) == (pytest.approx(0.2), pytest.approx(0.2 - 0.2484, abs=1e-4))
    assert found[32]["mean"] == pytest.approx(-0.1) and found[32]["over"] == ""
    assert "+0.200 [-0.048, +0.448]" in screen and "less that of n=8" in screen
    with pytest.raises(UserError, match="--base=n=8 k=1 is no arm"):
        compared(tmp_path / "runs", base="n=8 k=1")
    for i, (n, rule, path) in enumerate([(8, "a", "x"), (8, "b", "x"), (16, "a", "x"), (16, "b", "x"), (16, "b", "y")]):
        settings = {"n": n, "rule": rule, "task": {"path": path}}  # of the first only n was typed, which names it
        leave(tmp_path / f"grid/{i}", settings=settings, words=[f"n={n}", f"rule={rule}"][: 1 + i])
    grid = compared(tmp_path / "grid", base="rule=b task.path=x")
    assert grid.bases == (grid.arms[1], None, grid.arms[3], None, None), "the same n; not another task"
    leave(tmp_path / "grid/9", settings={"n": 8, "rule": "a", "task": {"path": "x", "max_terms": 9}})
    assert compared(tmp_path / "grid").bases == (None, *[grid.arms[0]] * 3, None, None)
    (tmp_path / "grid/0/summary.json").unlink()
    assert compared(tmp_path / "grid").base == grid.arms[1].label, "the first that has a completed run"


def test_how_many_times_as_fast_an_arm_is_is_a_geometric_mean_over_the_seeds_that_get_there(tmp_path):
    """Ratios 2 and 8: 4, times or by 2 to the power of Student's 12.706 with one degree of freedom."""
    for seed, (slow, accuracy) in enumerate(((2.0, 0.9), (8.0, 0.9), (5.0, 0.2))):
        leave(tmp_path / f"a{seed}", (0.1, 0.9), settings={"n": 8, "seed": seed}, seconds_per_step=slow)
        leave(tmp_path / f"b{seed}", (0.1, accuracy), settings={"n": 16, "seed": seed})
    base, fast = compared(tmp_path).arms
    found = fast.speedup(base, 0.8)
    assert found is not None and found.mean == pytest.approx(4) and found.low == pytest.approx(4 / 2**12.706, rel=1e-3)
    assert found.high * found.low == pytest.approx(16) and fast.speedup(base, 0.95) is None


def test_a_run_that_did_not_complete_changes_no_mean_and_a_repeated_seed_counts_once(tmp_path):
    for seed in range(2):
        leave(tmp_path / str(seed), settings={"seed": seed})
    alone = compared(tmp_path)
    for number, status in enumerate(("failed", "interrupted", None), 2):
        leave(tmp_path / str(number), (0.0, 0.1, 0.2), settings={"seed": number}, status=status)
    launched(tmp_path / "5", "skipped", "m > n", ["seed=3"])
    leave(tmp_path / "6", (0.1, 0.2), settings={"seed": 4})
    (tmp_path / "6" / "run.json").unlink()  # nobody knows its settings
    found = compared(tmp_path)
    (before,), (after,) = alone.arms, found.arms
    assert (before.final_accuracy, before.mean_curve) == (after.final_accuracy, after.mean_curve)
    assert all(before.mean(figure) == after.mean(figure) for figure in ("seconds", "generated_tokens", "peak_bytes"))
    assert [run.name for run in found.left_out] == ["2", "3", "4", "5", "6"]
    leave(tmp_path / "0a", (0.5, 0.8), settings={"seed": 1})  # listed before it, begun after it
    for name, hour in (("0a", 2), ("1", 1)):
        record = json.loads((tmp_path / name / "run.json").read_text())
        record["about"] = {"began": f"2026-01-01T0{hour}:00:00+00:00", "changed": ["optim.lr=2 (was 1)"]}
        (tmp_path / name / "run.json").write_text(json.dumps(record))
    (arm,) = compared(tmp_path).arms
    assert {run.name for run in arm.runs} == {"0", "0a"}
    assert (arm.others[0].name, arm.others[0].state) == ("1", State.REPEATED)
    assert arm.others[0].notes == ("changed on the way: optim.lr=2 (was 1)",)


def test_the_target_is_of_the_highest_accuracy(tmp_path):
    """That of n=1, which is neither the last arm nor its last evaluation."""
    for i, accuracies in enumerate([(0.5, 0.6, 0.4), (0.5, 0.9, 0.6), (0.7, 0.8, 0.75), (0.1, 0.2, 0.1)]):
        leave(tmp_path / "a" / str(i), accuracies, settings={"n": i})
    comparison = compared(tmp_path / "a")
    assert comparison.target == pytest.approx(0.95 * 0.9)
    leave(tmp_path / "a" / "other", choices={"task": "easy"})
    assert compared(tmp_path / "a").target is None, "accuracies of two tasks"
    assert "No completed run was evaluated" not in reported(tmp_path / "a")[0]
    shutil.rmtree(tmp_path / "a" / "other")
    leave(tmp_path / "a" / "again", (0.5, 0.6, 0.6), settings={"n": 1, "seed": 1}, seconds_per_step=2.0)
    assert compared(tmp_path / "a").arms[1].reaching(0.6) == [10.0, 20.0]
    assert "10.0 s (1 of 2)" in arm_table(compared(tmp_path / "a", target=0.7)).rows[1]
    leave(tmp_path / "b", {5: math.nan})  # not evaluated
    comparison = compared(tmp_path / "b")
    assert (comparison.target, comparison.arms[0].final_accuracy) == (None, None)
    assert math.isnan(estimate([1.0, math.nan]).mean), "what is no number does not go unseen"


def test_the_accuracy_of_samples_can_be_compared_instead(tmp_path):
    run = leave(tmp_path / "0")
    row = {"step": 4, "eval/accuracy": 1.0, "eval/pass@1": 0.375, "eval/pass@1_low": 0.125, "eval/pass@1_high": 0.625}
    (run / "metrics.jsonl").write_text(lines_of({"step": 0, "eval/pass@1": 0.25}, row | {"eval/length_mean": 9.0}))
    (found,) = runs_in(tmp_path, metric="eval/pass@1")
    assert (found.curve.values, found.curve.intervals[-1]) == ((0.25, 0.375), (0.125, 0.625))
    with pytest.raises(UserError, match="--metric=reward/mean is no accuracy in these runs: they have eval/accuracy, "):
        runs_in(tmp_path, metric="reward/mean")


def test_curves_of_different_evaluations_are_averaged_where_all_are():
    often = curve_of(rows_of({0: 0.0, 10: 1.0, 20: 1.0, 30: 1.0}, 30))
    seldom, late = curve_of(rows_of({0: 0.0, 20: 0.5}, 20, 3.0)), curve_of(rows_of({40: 1.0}, 40))
    mean = mean_curve([often, seldom])
    assert mean.steps == (0, 10, 20)  # the second one ends at 20, and is at 0.25 half-way
    assert mean.values == pytest.approx((0.0, 0.625, 0.75))
    assert mean.axes["clock/train_seconds"] == (0.0, 20.0, 40.0)
    assert interval([often, seldom])[1][1] == pytest.approx(0.625 + 12.7062 * 0.75 / 2, rel=1e-4)  # 12.7: Student's
    assert mean_curve([often, late]).steps == mean_curve([]).steps == ()


def test_arms_are_shown_and_apart_what_is_not_averaged(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for i, (n, seed, last) in enumerate([(8, 0, 0.7), (8, 1, 0.9), (16, 0, 0.95)]):
        settings = {"n": n, "seed": seed, "train": {"steps": 20}}
        leave(tmp_path / "runs" / str(i), (0.5, 0.6, last), settings=settings, words=[f"n={n}"])
    leave(tmp_path / "runs/3", (0.5, 0.4), settings={"n": 16, "seed": 1, "train": {"steps": 20}}, status="failed")
    launched(tmp_path / "runs/4", "skipped", "m=32 must be at most n=16", ["n=16", "m=32", "seed=2"])
    screen, numbers = reported(tmp_path / "runs", target=0.7)
    [line] = [line.split() for line in screen.splitlines() if line.split()[:2] == ["n=8", "2"]]
    # Student's interval of two seeds is 0.8 ± 12.7 * 0.14 / sqrt(2), cut to what an accuracy can be.
    assert line[2:] == ["0.800", "[0.000,", "1.000]", "–", "–"]
    assert "0.950 [0.100, 0.900]*" in screen and "All arms: before 0.500, time to target 20.0 s" in screen
    apart = screen.partition("Not averaged:")[2]
    assert all(part in apart for part in ("RuntimeError: it broke", "n=16 m=32", "m=32 must be at most", "10/20"))
    assert "pip install 'grpo-cli[plot]'" in screen
    first, second = numbers["arms"]
    assert (numbers["columns"], first["settings"], first["seconds_to_target"]["mean"]) == (["n"], {"n": 8}, 20.0)
    assert first["final_accuracy"]["mean"] == pytest.approx(0.8)
    assert first["runs"][1]["curve"]["values"] == [0.5, 0.6, 0.9]
    assert [run["state"] for run in (*second["not_averaged"], *numbers["without_settings"])] == ["failed", "skipped"]


def test_more_arms_than_colours_and_runs_without_numbers_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    for i in range(12):
        settings = {"_n": f"${i}"}  # a dollar would begin a formula, an underscore hide the label
        status = "completed" if i % 2 else "failed"
        leave(tmp_path / "runs" / str(i), (0.5, 0.5 + i / 100, 0.6), settings=settings, status=status)
    leave(tmp_path / "runs" / "12", {}, settings={"_n": "12"})
    reported(tmp_path / "runs")
    assert (tmp_path / "out" / "accuracy.pdf").read_bytes().startswith(b"%PDF")


def test_a_report_begins_with_what_its_runs_share(tmp_path):
    """Seeds and names are no setting; what differs is in the table."""
    words, weights = ("seed=0", "train.steps=20", "task.weights={correct: 1}"), {"task": {"weights": {"correct": 1}}}
    common = {"train": {"steps": 20}, "model": {"path": "models/own"}, **weights}
    for n in (8, 16):
        choices = {"model": "hf", "task": "jsonl"}
        leave(tmp_path / f"{n}", settings=common | {"n": n}, choices=choices, words=[f"n={n}", *words])
    about, command = overview(compared(tmp_path))
    assert about == "model hf, task jsonl, model.path models/own"
    assert command == "every run: grpo train train.steps=20 'task.weights={correct: 1}'"


def test_the_table_is_written_for_spreadsheets_pages_and_papers(tmp_path):
    for i, accuracy in enumerate((0.5, 0.25, 0.75, 0.25)):
        leave(tmp_path / f"{i}", (0.5, accuracy), settings={"rule": ("a|b_c", "d")[i % 2], "seed": i // 2})
    found = {name: data.decode() for name, data in in_files(compared(tmp_path)).items()}
    one, other = csv.DictReader(found["report.csv"].splitlines())
    names = ("rule", "runs", "final_accuracy", "difference", "final_accuracy_seed_0", "final_accuracy_seed_1")
    assert [one[name] for name in names] == ["a|b_c", "2", "0.625", "", "0.5", "0.75"]
    assert float(other["difference"]) == -0.375 and float(other["difference_low"]) == -1.0, "not -0.375 - 12.7 * 0.125"
    assert "| a\\|b_c | 0.625 [0.000, 1.000] | – |" in found["report.md"]
    assert r"d & 0.250 [0.100, 0.900]* & $-$0.375 [$-$1.000, +1.000] &" in found["report.tex"]
    assert all(part in found["report.tex"] for part in (r"\caption{", r"less that of rule=a|b\_c", "0.594 (95\\% of"))


def test_in_a_narrow_terminal_every_cell_is_shown_beside_its_row(monkeypatch):
    table = Table(("arm", "time to target", "peak"), (("a b", "1.2 s (2 of 3)", "3 MiB"), ("日本", "–", "4 MiB")))
    monkeypatch.setenv("TERM", "dumb")
    for width in range(21, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        screen = io.StringIO()
        print_table(terminal.console(screen, force_terminal=True), table)
        lines = screen.getvalue().splitlines()
        assert all(cell_len(line) <= width for line in lines) and sum("time to target" in line for line in lines) == 1
        assert [line for line in lines if line.startswith("日本")][-1].endswith(" 4 MiB")


def test_the_command_reports_real_runs_as_their_summaries_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = "train.prompts=2 sampling.max_new_tokens=6 eval.problems=4 eval.k=1 logger=jsonl device=cpu".split()
    for n in (2, 3):
        done("train", *small, f"n={n}", "train.steps=2", "eval.every=1", f"hydra.run.dir=runs/{n}")
    done("report", "runs")
    (out,) = (tmp_path / "outputs" / "report").iterdir()
    found = json.loads((out / "report.json").read_text())
    assert (found["columns"], found["also_different"]) == (["n"], ["m"])
    (first,), (second,) = (arm["runs"] for arm in found["arms"])
    for run in (first, second):
        summary = json.loads((Path(run["folder"]) / "summary.json").read_text())
        assert run["curve"]["values"][-1] == summary["final_accuracy"] and run["curve"]["steps"] == [0, 1, 2]
        assert (run["steps"], run["seconds"]) == (2, summary["train_seconds"])
        totals = [summary[name] for name in ("generated_tokens", "trained_tokens")]
        assert [run["generated_tokens"], run["trained_tokens"]] == totals
