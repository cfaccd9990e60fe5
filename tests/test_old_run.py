"""A run folder that an earlier version wrote (commit 062925d, before modules were moved and words renamed) is still
resumed, evaluated and reported. `old_run/` is that run: adapters of rank 1, two steps, correction=mis."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_cli.cli.main import app

OLD = Path(__file__).parent / "old_run"


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def grpo(*words: str) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_an_old_run_is_evaluated_as_it_was_in_training(old_run: Path):
    grpo("eval", f"checkpoint={old_run}", "eval.problems=4", "hydra.run.dir=evaluated")
    now = json.loads(Path("evaluated/summary.json").read_text())
    last = json.loads((old_run / "metrics.jsonl").read_text().splitlines()[-1])
    assert now["eval/accuracy"] == last["eval/accuracy"]


def test_an_old_run_goes_on(old_run: Path):
    before = (old_run / "metrics.jsonl").read_text()
    grpo("train", f"resume={old_run}", "train.steps=3")
    assert json.loads((old_run / "summary.json").read_text())["step"] == 3
    assert (old_run / "metrics.jsonl").read_text().startswith(before)


def test_an_old_run_is_reported(old_run: Path):
    grpo("report", str(old_run), "--out", "page")
    assert "0.750" in Path("page/report.html").read_text()
