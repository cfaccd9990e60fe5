"""Run folders to a comparison: what is read, what differs, who is averaged, and with which interval."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import made
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.report.compare import compare, estimate
from grpo_cli.report.curves import Curve, curve_of, deviation, mean_curve
from grpo_cli.report.evaluations import headline
from grpo_cli.report.make import make
from grpo_cli.report.read import GREEDY, FoundRuns, Run, State, of_training, read_all, read_rows, read_run
from grpo_cli.report.tables import arm_table, as_json, footnotes
from grpo_cli.runs.lock import sole_use
from grpo_cli.support.errors import UserError


def rows_of(accuracies: Mapping[int, float], steps: int, seconds_per_step: float = 1.0) -> list[dict[str, Any]]:
    """A run's records, every step alike: one second, 100 tokens generated and 25 trained."""
    rows: list[dict[str, Any]] = []
    for step in range(steps + 1):
        row: dict[str, Any] = {"step": step}
        if step:
            row |= {"clock/train_seconds": seconds_per_step * step, "time/step": seconds_per_step}
            row |= {"time/rollout": 0.5 * seconds_per_step, "time/update": 0.25 * seconds_per_step}
            row |= {"tokens/generated": 100.0 * step, "tokens/trained": 25.0 * step}
            row |= {"memory/peak_bytes": 2.0**20 * step}
        if step in accuracies:
            row |= {"eval/accuracy": accuracies[step], "eval/accuracy_low": 0.1, "eval/accuracy_high": 0.9}
        rows.append(row)
    return rows


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
    rows = rows_of(accuracies, max(accuracies, default=0), seconds_per_step)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if status is not None:
        error = "RuntimeError: it broke" if status == "failed" else None
        (folder / "summary.json").write_text(json.dumps({"status": status, "error": error, "train_seconds": 1.0}))
    return folder


def launched(folder: Path, state: str, reason: str | None = None, words: Sequence[str] = ()) -> None:
    """The launcher's word on a job."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"state": state, "reason": reason, "overrides": list(words), "exit_code": None, "log": "log.txt"}
    (folder / "status.json").write_text(json.dumps(told))


def read_runs(folders: Sequence[Path], metric: str = GREEDY) -> FoundRuns:
    return of_training(read_all(folders, metric), folders, metric)


def runs_in(folder: Path) -> tuple[Run, ...]:
    return read_runs([folder]).runs


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = read_run(leave(tmp_path / "a", (0.25, 0.5, 0.375), settings={"seed": 7}, seconds_per_step=2.0), "a")
    assert (run.state, run.reason, run.asked.seed, run.notes) == (State.COMPLETED, "", 7, ())
    assert run.curve.steps == (0, 10, 20)
    assert run.curve.along("clock/train_seconds") == (0.0, 20.0, 40.0)
    assert (run.final_accuracy, run.best_accuracy, run.accuracy_interval) == (0.375, 0.5, (0.1, 0.9))
    assert (run.steps, run.seconds, run.generated_tokens, run.trained_tokens) == (20, 40.0, 2000.0, 500.0)
    assert run.peak_bytes == 20 * 2**20
    assert run.step_seconds == {"rollout": 1.0, "update": 0.5, "other": 0.5}


@pytest.mark.parametrize("metric, column", [("policy/entropy", "last entropy"), ("turns/mean", "last turns")])
def test_what_some_runs_end_with_is_told_where_any_has_it(tmp_path, metric, column):
    """Two seeds at 0.25 and 0.75; a run from before it was measured, or without turns, whose arm has none."""
    for seed, last in enumerate((0.25, 0.75)):
        rows = leave(tmp_path / str(seed), settings={"n": 4, "seed": seed}) / "metrics.jsonl"
        steps = [json.loads(line) for line in rows.read_text().splitlines()]
        steps[-2] |= {metric: 0.9}
        steps[-1] |= {metric: last}
        rows.write_text("".join(json.dumps(row) + "\n" for row in steps))
    found = compare(runs_in(tmp_path))
    table = arm_table(found)
    assert [float(row[table.columns.index(column)]) for row in table.rows] == [0.5]
    assert as_json(found)["arms"][0][column.removeprefix("last ")]["mean"] == 0.5
    leave(tmp_path / "old", settings={"n": 8})
    table = arm_table(compare(runs_in(tmp_path)))
    assert [row[table.columns.index(column)] for row in table.rows][1] == "–"
    assert column not in arm_table(compare(runs_in(tmp_path / "old"))).columns


def test_runs_of_different_code_are_compared_but_said_to_be(tmp_path):
    def left(name: str, code: object) -> None:
        summary = leave(tmp_path / name, settings={"n": 4, "seed": int(name)}) / "summary.json"
        summary.write_text(json.dumps({"status": "completed", **({} if code is None else {"code": code})}))

    def said() -> list[str]:
        return [note for note in footnotes(compare(runs_in(tmp_path))) if "code" in note]

    same = {"grpo_cli": "0.1.0", "commit": "aa", "modified": False, "torch": "2.13"}
    left("0", same)
    left("1", same)
    assert said() == []
    left("2", {**same, "modified": True})
    left("3", {**same, "commit": None, "modified": None})
    (note,) = said()
    assert "commit aa (2 runs), aa (modified) (1 run), not recorded (1 run)." in note
    left("4", None)
    left("5", "\x1b[31m")
    (note,) = said()
    assert "grpo_cli 0.1.0 (4 runs), not recorded (2 runs); commit" in note and "torch 2.13 (4 runs)" in note


# Files that are damaged


@given(cut=st.integers(min_value=0), rows=st.integers(0, 4))
def test_a_file_that_ends_anywhere_loses_its_last_line_at_most(tmp_path_factory, cut, rows):
    whole = "".join(json.dumps(row) + "\n" for row in rows_of({0: 0.5}, rows)).encode()
    cut %= len(whole) + 1
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_bytes(whole[:cut])
    found, notes = read_rows(path)
    complete = whole[:cut].count(b"\n") + (whole[:cut].endswith(b"}"))  # only the newline is missing
    assert [row["step"] for row in found] == list(range(complete))
    assert bool(notes) == (cut > 0 and whole[cut - 1 : cut] not in (b"\n", b"}"))


def test_a_resumed_run_that_went_back_counts_once(tmp_path):
    """The second process wrote steps 2 and 3 anew and stopped before the first one's steps 4 and 5."""
    first = [{"step": step, "reward/mean": 0.0} for step in range(6)]
    second = [{"step": step, "reward/mean": 1.0} for step in (2, 3)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in first + second))
    rows, notes = read_rows(path)
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0)]
    assert notes == []


@pytest.mark.usefixtures("no_collection")
def test_what_is_no_record_is_left_out_and_said(tmp_path):
    lines = [
        '{"step": 0, "eval/accuracy": 0.5}',
        "not json",
        "[1]",
        '{"eval/accuracy": 1}',
        '{"step": "NaN"}',
        "\udcff",
        "[" * 100_000,
        '{"step": 1, "eval/accuracy": "NaN", "loss/total": "-Infinity", "x": null, "y": "text"}',
        '{"step": 2, "eval/accuracy": 1, "memory/peak_bytes": 1' + "0" * 400 + "}",
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("\n".join([*lines, ""]).encode("utf-8", "surrogateescape"))
    rows, notes = read_rows(path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert math.isnan(rows[1]["eval/accuracy"]) and rows[1]["loss/total"] == -math.inf
    assert notes == [
        "metrics.jsonl: x is not always a number",
        "metrics.jsonl: y is not always a number",
        "metrics.jsonl: lines 2, 3, 4, 5, 6, 7 cannot be read and were left out",
    ]
    run = read_run(tmp_path, "a")
    assert (run.curve.steps, run.curve.accuracy, run.peak_bytes) == ((0, 2), (0.5, 1.0), None)


def test_nothing_in_a_config_is_executed(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "told")
    run = leave(tmp_path / "a", settings={"n": 8, "m": "${n}", "x": "${oc.env:SECRET}"})
    asked = read_run(run, "a").asked
    assert (asked.settings["m"], asked.settings["x"]) == (8, "${oc.env:SECRET}")


# How runs ended


NOBODY = "no summary.json, and no process is at it"
BROKE = "RuntimeError: it broke"


@pytest.mark.parametrize(
    ("status", "summary", "state", "reason"),
    [
        (None, "completed", State.COMPLETED, ""),
        (None, "interrupted", State.INTERRUPTED, ""),
        (None, "failed", State.FAILED, BROKE),
        (None, None, State.UNFINISHED, NOBODY),
        (("done", None), "completed", State.COMPLETED, ""),
        (("done", None), None, State.UNFINISHED, NOBODY),
        (("failed", "signal\n9\x1b[31m"), None, State.FAILED, "signal 9\N{REPLACEMENT CHARACTER}[31m"),
        (("failed", None), "failed", State.FAILED, BROKE),
        (("running", None), "interrupted", State.INTERRUPTED, ""),
        (("running", None), None, State.UNFINISHED, NOBODY),
        (("skipped", "m > n"), None, State.SKIPPED, "m > n"),
        (("waiting", None), None, State.WAITING, ""),
    ],
)
def test_how_a_run_ended_is_the_launcher_s_word_before_the_run_s_own(tmp_path, status, summary, state, reason):
    run = leave(tmp_path / "0", status=summary)
    if status:
        launched(run, *status)
    found = read_run(run, "0")
    assert (found.state, found.reason.partition(";")[0]) == (state, reason)


@pytest.mark.parametrize("status", [None, "completed"])
def test_a_run_is_running_as_long_as_a_process_holds_its_folder(tmp_path, status):
    run = leave(tmp_path / "0", status=status)
    with sole_use(run, print):
        assert read_run(run, "0").state == State.RUNNING
    assert read_run(run, "0").state != State.RUNNING


def test_damaged_small_files_are_notes(tmp_path):
    run = leave(tmp_path / "0")
    (run / "summary.json").write_text('{"status": "comp')
    (run / "status.json").write_text("[]")
    found = read_run(run, "0")
    assert found.state == State.UNFINISHED
    assert found.notes[0] == "status.json holds no JSON object"
    assert found.notes[1].startswith("summary.json cannot be read: ")


# Which runs there are


def test_runs_are_found_below_any_folder_once_and_jobs_come_in_order(tmp_path):
    for name in ("sweep/10", "sweep/9", "sweep/2/", "train/b", "train/a"):
        leave(tmp_path / name)
    leave(tmp_path / "train/a/checkpoints/step_000001")  # below a run nothing is looked for
    found = read_runs([tmp_path, tmp_path / "sweep" / "9"]).runs
    names = ["sweep/2", "sweep/9", "sweep/10", "train/a", "train/b"]
    assert [run.name for run in found] == [f"{tmp_path.name}/{name}" for name in names]
    assert [run.name for run in runs_in(tmp_path / "sweep" / "9")] == ["9"]


def test_jobs_that_have_not_begun_are_listed_with_what_they_will_run(tmp_path):
    leave(tmp_path / "0", settings={"n": 8}, words=["n=8"])
    jobs = [{"number": i, "folder": f"/moved/from/{i}", "overrides": [f"n={n}"]} for i, n in enumerate((8, 16))]
    (tmp_path / "sweep.json").write_text(json.dumps({"overrides": ["n=8,16"], "jobs": jobs}))
    first, second = runs_in(tmp_path)
    assert (first.name, first.state, second.name, second.state) == ("0", State.COMPLETED, "1", State.WAITING)
    assert second.asked.settings == {"n": 16}


def test_evaluations_are_left_out_and_named(tmp_path):
    leave(tmp_path / "train")
    made.record(tmp_path / "eval", {}, command="eval")
    found = read_runs([tmp_path])
    assert ([run.name for run in found.runs], [run.name for run in found.others]) == (["train"], ["eval"])
    with pytest.raises(UserError, match=r"no training run in or below .*eval \(1 runs of other"):
        read_runs([tmp_path / "eval"])


def test_evaluations_alone_are_shown_side_by_side(tmp_path, capsys):
    """By what differs in their settings; the first was asked for no search, so that has nothing to show."""
    greedy = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.25, "eval/accuracy_high": 0.75, "eval/length_mean": 18.4}
    found = {"search/accuracy": 0.625, "search/tokens": 1264.0}
    for name, summary in {"none": greedy, "majority": greedy | found}.items():
        made.record(tmp_path / name, {}, choices={"search": name}, command="eval")
        (tmp_path / name / "summary.json").write_text(json.dumps({"status": "completed", **summary}))
    assert make([tmp_path], tmp_path / "out") is None
    assert not (tmp_path / "out").exists()
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if "search" in line]
    assert shown == [
        "evaluation search greedy tokens tokens of a reply",
        "search=majority 0.625 0.500 (0.250–0.750) 1,264 18",
        "search=none – 0.500 (0.250–0.750) – 18",
    ]
    assert headline({"status": "failed"}) == "" and headline(greedy | found) == "search 0.625"


def test_folders_without_runs_are_refused(tmp_path):
    with pytest.raises(UserError, match="no training run in or below"):
        read_runs([tmp_path])
    with pytest.raises(UserError, match="is not a folder: name run folders"):
        read_runs([tmp_path / "nowhere"])


# What differs


def columns(tmp_path: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    comparison = compare(runs_in(tmp_path))
    return comparison.columns, dict(comparison.implied)


def test_columns_are_the_settings_that_differ_and_are_no_names(tmp_path):
    for i, (n, lr) in enumerate([(8, 1e-4), (16, 1e-4), (16, 3e-4)]):
        same = {"task": {"max_terms": 4}, "train": {"steps": 80}}
        settings = {"n": n, "optim": {"lr": lr}, "seed": i, "run_dir": f"{i}", "logger": {"name": f"run {i}"}, **same}
        leave(tmp_path / str(i), settings=settings)
    assert columns(tmp_path) == (("n", "optim.lr"), {})
    assert [arm.label for arm in compare(runs_in(tmp_path)).arms][-1] == "n=16 optim.lr=0.0003"


def test_a_choice_speaks_for_what_it_brings_and_a_reference_for_what_it_follows(tmp_path):
    full, slots = {"_target_": "sampler.Full"}, {"_target_": "sampler.Infinite", "slots": 16}
    leave(tmp_path / "0", settings={"n": 8, "m": "${n}", "sampler": full}, choices={"sampler": "full"})
    leave(tmp_path / "1", settings={"n": 16, "m": "${n}", "sampler": slots}, choices={"sampler": "infinite"})
    brought = {"m": "n", "sampler._target_": "sampler", "sampler.slots": "sampler"}
    assert columns(tmp_path) == (("sampler", "n"), brought)
    # Slots that differ where the sampler does not are a difference of their own.
    other = {"_target_": "sampler.Infinite", "slots": 32}
    leave(tmp_path / "2", settings={"n": 16, "m": "${n}", "sampler": other}, choices={"sampler": "infinite"})
    assert columns(tmp_path)[0] == ("sampler", "n", "sampler.slots")


def test_what_was_typed_is_always_a_column_in_the_order_of_typing(tmp_path):
    leave(tmp_path / "0", settings={"n": 8, "m": 4}, choices={"experiment": "a"}, words=["m=4", "experiment=a"])
    leave(tmp_path / "1", settings={"n": 16, "m": 8}, choices={"experiment": "b"}, words=["m=8", "experiment=b"])
    assert columns(tmp_path) == (("m", "experiment"), {"n": "experiment"})


# Who is averaged


def test_runs_that_differ_only_in_their_seed_are_one_arm(tmp_path):
    for seed, accuracy in enumerate((0.8, 0.9, 1.0)):
        leave(tmp_path / str(seed), (0.5, accuracy), settings={"seed": seed})
    (arm,) = compare(runs_in(tmp_path)).arms
    final = arm.final_accuracy
    # Student's quantile with two degrees of freedom is 4.3027: 4.3027 * 0.1 / sqrt(3) = 0.2484
    assert (final.mean, final.low, final.over) == (pytest.approx(0.9), pytest.approx(0.6516, abs=1e-4), "seeds")
    assert final.high == 1.0, "an accuracy is at most 1"
    assert arm.label == "all runs"


def test_one_seed_has_the_interval_of_its_evaluation(tmp_path):
    leave(tmp_path / "0")
    (arm,) = compare(runs_in(tmp_path)).arms
    found = arm.final_accuracy
    assert (found.mean, found.low, found.high, found.over) == (0.75, 0.1, 0.9, "problems")
    assert (arm.best_accuracy.over, arm.mean("seconds").mean) == ("", 10.0)


def test_seeds_that_agree_are_not_taken_for_certainty(tmp_path):
    """Two seeds of equal accuracy once got an interval of no width."""
    for seed in range(2):
        leave(tmp_path / str(seed), settings={"seed": seed})
    (arm,) = compare(runs_in(tmp_path)).arms
    assert (arm.final_accuracy.low, arm.final_accuracy.high, arm.final_accuracy.over) == (0.1, 0.9, "problems")
    assert arm.best_accuracy.over == ""


@pytest.mark.parametrize("status", ["failed", "interrupted", None])
def test_a_run_that_did_not_complete_changes_no_mean(tmp_path, status):
    leave(tmp_path / "0", settings={"seed": 0})
    leave(tmp_path / "1", settings={"seed": 1})
    alone = compare(runs_in(tmp_path))
    leave(tmp_path / "2", (0.0, 0.1, 0.2), settings={"seed": 2}, status=status)
    launched(tmp_path / "3", "skipped", "m > n", ["seed=3"])
    (before,), (after,) = alone.arms, compare(runs_in(tmp_path)).arms
    for name in ("final_accuracy", "best_accuracy", "mean_curve"):
        assert getattr(before, name) == getattr(after, name), name
    for figure in ("seconds", "generated_tokens", "peak_bytes"):
        assert before.mean(figure) == after.mean(figure), figure
    assert [run.name for run in after.others] == ["2", "3"]


def test_a_seed_that_was_run_twice_counts_once(tmp_path):
    leave(tmp_path / "0", (0.5, 0.6))
    leave(tmp_path / "1", (0.5, 0.8))
    (arm,) = compare(runs_in(tmp_path)).arms
    assert [run.name for run in arm.runs] == ["1"]
    (earlier,) = arm.others
    assert (earlier.name, earlier.state) == ("0", State.REPEATED) and "seed 0" in earlier.reason


def test_a_run_of_unknown_settings_is_not_averaged(tmp_path):
    leave(tmp_path / "0")
    leave(tmp_path / "1", (0.1, 0.2))
    (tmp_path / "1" / "run.json").unlink()
    (arm,) = compare(runs_in(tmp_path)).arms
    (other,) = arm.others
    assert arm.final_accuracy.mean == 0.75 and "no run.json" in other.reason


def test_a_job_without_a_config_joins_the_arm_that_its_overrides_fit(tmp_path):
    for i, n in enumerate((8, 16)):
        leave(tmp_path / str(i), settings={"n": n, "m": 4}, words=[f"n={n}"])
    launched(tmp_path / "2", "waiting", None, ["n=16", "seed=1"])
    launched(tmp_path / "3", "skipped", "m=32 > n=8", ["n=8", "m=32"])
    comparison = compare(runs_in(tmp_path))
    assert comparison.columns == ("n", "m")
    assert [(arm.label, len(arm.runs), len(arm.others)) for arm in comparison.arms] == [
        ("n=8 m=4", 1, 0),
        ("n=16 m=4", 1, 1),
        ("n=8 m=32", 0, 1),
    ]


# Times to an accuracy, curves and intervals


def test_the_time_to_an_accuracy_counts_who_never_gets_there(tmp_path):
    for seed, (accuracies, seconds) in enumerate([((0.5, 0.8, 0.9), 1.0), ((0.5, 0.9, 0.9), 2.0), ((0.5, 0.7), 1.0)]):
        leave(tmp_path / str(seed), accuracies, settings={"seed": seed}, seconds_per_step=seconds)
    comparison = compare(runs_in(tmp_path), target=0.8)
    found = comparison.arms[0].reaching(0.8)
    assert (found.seconds, found.reached, found.never) == (15.0, 2, 1)  # 10 s and 20 s
    with pytest.raises(UserError, match="--target=80 must be an accuracy above 0 and at most 1"):
        compare(comparison.runs, target=80.0)


def test_the_highest_accuracy_counts_wherever_it_was_and_the_last_one_is_final(tmp_path):
    """n=1 had the best evaluation, n=2 ends best; neither is the last arm, nor any best the last evaluation."""
    for i, accuracies in enumerate([(0.5, 0.6, 0.4), (0.5, 0.9, 0.6), (0.7, 0.8, 0.75), (0.1, 0.2, 0.1)]):
        leave(tmp_path / str(i), accuracies, settings={"n": i})
    comparison = compare(runs_in(tmp_path))
    assert [arm.best_accuracy.mean for arm in comparison.arms] == [0.6, 0.9, 0.8, 0.2]
    assert [arm.final_accuracy.mean for arm in comparison.arms] == [0.4, 0.6, 0.75, 0.1]
    assert comparison.target == pytest.approx(0.95 * 0.9) and comparison.best.label == "n=2"


def test_the_accuracy_of_samples_can_be_compared_instead(tmp_path):
    run = leave(tmp_path / "0")
    rows = [{"step": 0, "eval/pass@1": 0.25}, {"step": 4, "eval/accuracy": 1.0, "eval/pass@1": 0.375}]
    rows[1] |= {"eval/pass@1_low": 0.125, "eval/pass@1_high": 0.625, "eval/pass@16": 0.75, "eval/length_mean": 9.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = read_runs([tmp_path], "eval/pass@1").runs
    assert (found.curve.accuracy, found.accuracy_interval) == ((0.25, 0.375), (0.125, 0.625))
    assert found.accuracies == ("eval/accuracy", "eval/pass@1", "eval/pass@16")
    with pytest.raises(UserError, match="--metric=reward/mean is no accuracy in these runs: they have eval/accuracy, "):
        read_runs([tmp_path], "reward/mean")


def test_runs_without_evaluations_have_no_accuracy_and_no_target(tmp_path):
    leave(tmp_path / "0", {5: math.nan})
    comparison = compare(runs_in(tmp_path))
    assert (comparison.target, comparison.best, comparison.arms[0].final_accuracy) == (None, None, None)
    assert comparison.arms[0].mean("seconds").mean == 5.0


def curve(points: Mapping[int, float], seconds_per_step: float = 1.0) -> Curve:
    return curve_of(rows_of(points, max(points), seconds_per_step))


def test_curves_of_different_evaluations_are_averaged_where_all_are():
    often, seldom = curve({0: 0.0, 10: 1.0, 20: 1.0, 30: 1.0}), curve({0: 0.0, 20: 0.5}, seconds_per_step=3.0)
    mean = mean_curve([often, seldom])
    assert mean.steps == (0, 10, 20)  # the second one ends at 20, and is at 0.25 half-way
    assert mean.accuracy == pytest.approx((0.0, 0.625, 0.75))
    assert mean.axes["clock/train_seconds"] == (0.0, 20.0, 40.0)
    assert deviation([often, seldom])[1] == pytest.approx(0.75 / 2**0.5)
    assert mean_curve([often, curve({40: 1.0})]).steps == ()
    assert mean_curve([]).steps == ()


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_an_interval_holds_its_mean_and_stays_where_a_mean_can_be(values):
    found = estimate(values, 0.0, 1.0)
    if min(values) == max(values):
        assert found.over == "" and math.isnan(found.low)
        return
    assert 0.0 <= found.low <= found.mean + 1e-12 and found.mean - 1e-12 <= found.high <= 1.0


def test_an_estimate_of_nothing_is_none_and_of_no_number_is_no_number():
    assert estimate([None, None]) is None
    assert math.isnan(estimate([1.0, math.inf]).mean)
    assert estimate([2.0, None]).over == ""
