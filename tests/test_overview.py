"""What runs of a report share, and its table as text, worked out by hand."""

from __future__ import annotations

import csv

from test_report import compared, leave

from grpo_cli.report.overview import in_files, overview
from grpo_cli.report.tables import Table


def test_a_report_begins_with_what_its_runs_share(tmp_path):
    """Seeds and names are no setting; what differs is in the table."""
    words, common = ("seed=0", "train.steps=20"), {"train": {"steps": 20}, "model": {"path": "models/own"}}
    for n in (8, 16):
        choices = {"model": "hf", "task": "jsonl"}
        leave(tmp_path / f"{n}", settings=common | {"n": n}, choices=choices, words=[f"n={n}", *words])
    about, command = overview(compared(tmp_path))
    assert about == "model hf, task jsonl, model.path models/own"
    assert command == "all of them: grpo train train.steps=20"


def test_a_table_is_written_for_spreadsheets_pages_and_papers():
    table = Table(("arm", "share"), (("a|b_c, d", "1–2%"),), frozenset({"share"}))
    found = {name: data.decode() for name, data in in_files(table).items()}
    assert [*csv.reader(found["report.csv"].splitlines())] == [["arm", "share"], ["a|b_c, d", "1–2%"]]
    assert found["report.md"] == "| arm | share |\n| --- | ---: |\n| a\\|b_c, d | 1–2% |\n"
    assert found["report.tex"].splitlines()[2:5] == [r"arm & share \\", r"\midrule", r"a|b\_c, d & 1--2\% \\"]
