"""`grpo ls`: runs in a folder and below, whatever their state, one in a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import made
from test_report import launched, leave
from typed import done

from grpo_cli.cli import ls


def listed(*arguments: str) -> list[str]:
    return [" ".join(line.split()) for line in done("ls", *arguments).splitlines()]


def aged(folder: Path, hours: float) -> None:
    """As if the run had last written so long before the latest ones, which are of this second."""
    for file in (path for path in folder.rglob("*") if path.is_file()):
        told = file.stat().st_mtime - 3600 * hours
        os.utime(file, (told, told))


SETTINGS = {"n": 8, "m": "${n}", "train": {"steps": 20}, "model": {"path": "Qwen/Qwen3-0.6B"}}


def test_runs_are_listed_with_their_settings_and_what_they_reached_the_newest_first(elsewhere, monkeypatch):
    asked = {"settings": SETTINGS, "choices": {"task": "gsm8k", "model": "tiny"}}
    aged(leave(elsewhere / "outputs/train/old", (0.5, 0.6, 0.7), **asked), hours=50)
    aged(leave(elsewhere / "outputs/train/broke", (0.5, 0.4), **asked, status="failed"), hours=3)
    hub = {"settings": {**SETTINGS, "m": 4}, "choices": {"task": "math", "model": "hf"}}
    leave(elsewhere / "outputs/train/going", (0.25,), **hub, status=None)
    now = (elsewhere / "outputs/train/broke/summary.json").stat().st_mtime + 3 * 3600 + 1
    monkeypatch.setattr(ls, "time", SimpleNamespace(time=lambda: now))
    head, *rows = listed()
    assert head == "command state task model n m steps accuracy age folder"
    assert rows[0].startswith("train unfinished math Qwen/Qwen3-0.6B 8 4 0/20 0.250 ")
    assert rows[0].endswith(" outputs/train/going")
    assert rows[1] == "train failed gsm8k tiny 8 8 10/20 0.400 3h00m outputs/train/broke"
    assert rows[2] == "train completed gsm8k tiny 8 8 20/20 0.700 2 days outputs/train/old"
    assert rows[3].startswith("outputs/train/going: no summary.json, and no process is at it")
    assert rows[4] == "outputs/train/broke: RuntimeError: it broke"


def test_jobs_of_a_sweep_are_listed_before_they_begin_and_evaluations_with_their_accuracy(elsewhere):
    sweep = elsewhere / "outputs/one"
    leave(sweep / "0", settings=SETTINGS)
    launched(sweep / "1", "skipped", "m=32 must be at most n=16", ["n=16", "m=32"])
    jobs = [{"folder": f"{sweep}/{i}", "overrides": ["n=4"]} for i in range(3)]
    no_folders = [{"folder": name} for name in ("\0", 300 * "x")]
    (sweep / "sweep.json").write_text(json.dumps({"jobs": [*no_folders, *jobs]}))
    for command in ("eval", "profile"):
        folder = elsewhere / "outputs" / command
        made.record(folder, {"seed": 0}, choices={"task": "math", "model": "tiny"}, command=command)
        told = {"status": "completed", "eval/accuracy": 0.625, "checkpoint": None, "engine": {"threads": 1}}
        (folder / "summary.json").write_text(json.dumps({**told, "step": float("nan"), "huge": 10**400}))
    rows = {row.rpartition("/")[2]: row for row in listed("outputs")[1:] if ": " not in row}
    assert rows.keys() == {"0", "1", "2", "eval"} and rows["0"].startswith("train completed ")
    assert rows["1"].startswith("train skipped - - 16 32 ")
    assert rows["2"].startswith("train waiting - - 4 - 0/? - -")
    assert rows["eval"].startswith("eval completed math tiny - - - 0.625 ")


def test_damaged_files_cost_a_remark_and_nothing_else(elsewhere):
    run = leave(elsewhere / "outputs/\x1b[31m[red]", settings={**SETTINGS, "n": "\x1b]0;title\x07"})
    for name, text in (("summary.json", "{"), ("run.json", ": :\n\t"), ("metrics.jsonl", "nothing\n{")):
        (run / name).write_text(text)
    leave(elsewhere / "outputs/whole")
    lines = listed()
    assert "".join(lines).isprintable() and len([line for line in lines if line.startswith("train")]) == 2
    remarks = [line.partition(": ")[2] for line in lines if "[red]: " in line]
    assert [remark.split(" ")[0] for remark in remarks[1:]] == ["run.json", "summary.json", "metrics.jsonl:"]


def test_a_narrow_screen_leaves_out_what_is_least_needed(elsewhere, monkeypatch, capsys):
    leave(elsewhere / "outputs/train/a_folder_with_quite_a_long_name", (0.5,), settings=SETTINGS)
    monkeypatch.setattr(ls.terminal, "console", lambda: SimpleNamespace(is_terminal=True, width=80))
    ls.list_runs(Path("outputs"))
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["state", "model", "steps", "accuracy", "folder"] and len(row) <= 80
    assert row.endswith("outputs/train/a_folder_with_quite_a_long_name")
