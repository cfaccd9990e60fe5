"""`grpo init`: what its README.md tells to type runs at once, every file says what it is, nothing is written over."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from processes import Forked
from test_export import generated
from typed import content, done, grpo, json_lines, refused


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    place, *commands = done("init", "my experiment/").splitlines()
    assert place == "cd 'my experiment'" and os.listdir(tmp_path) == ["my experiment"]
    page = (tmp_path / "my experiment" / "README.md").read_text()
    assert commands == re.findall("^    (grpo .*)", page, re.MULTILINE)
    return tmp_path / "my experiment"


def typed(folder: Path, *begins: str, more: str = "") -> str:
    """The README's command that begins so, in the folder."""
    lines = re.findall("^    grpo (.*)", (folder / "README.md").read_text(), re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line in lines]
    (command,) = (words for words in commands if words[: len(begins)] == list(begins))
    process = Forked(*command, *more.split(), cwd=folder, env={"HF_HUB_OFFLINE": "1"})
    code, said = process.wait(), process.communicate()[0]
    assert code == 0, said
    return said


@pytest.mark.process
def test_its_own_run_is_trained_with_its_reward_its_rule_and_its_rows_and_exported(folder: Path) -> None:
    typed(folder, "train", "--config-dir=conf", "experiment=mine")
    run = folder / "outputs" / "train" / "mine"
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    rows = json_lines(folder / "rows.jsonl")
    assert len({row["question"] for row in rows}) == 60
    assert all(eval(row["question"]) == int(row["answer"]) for row in rows)
    rollouts = json_lines(run / "rollouts.jsonl")
    assert {row["prompt"] for row in rollouts} <= {f"{row['question']}=" for row in rows}
    config = json.loads((run / "run.json").read_text())["config"]
    assert [config[group]["_target_"] for group in ("downsample", "advantage")] == ["rules.outer", "rules.centred"]
    assert "worked_out" in typed(folder, "show")
    typed(folder, "train", "--config-dir=conf", "experiment=sweep", more="train.steps=1 seed=0")
    assert "maxvar" in typed(folder, "report")
    typed(folder, "export")
    card = (folder / "model" / "README.md").read_text()
    assert "    experiment=mine" in card.splitlines()
    assert len(generated(folder / "model", ["2+3="])) == 1


def test_a_broken_file_of_one_s_own_is_named_with_its_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "conf/experiment/broken.yaml").write_text("n: 4\n  m: 2\n")
    for more in ([], ["-m", "seed=1,2"], ["--help"]):
        said = refused("train", "--config-dir=conf", "experiment=broken", *more)
        assert "broken.yaml" in said and "line 2" in said


def test_settings_of_one_s_own_experiment_and_choices_are_known_beside_one_that_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "conf/experiment/own.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /loss: my_loss\ntask:\n  weights:\n    part: 1.0\n"
    )
    (folder / "conf/loss").mkdir()
    (folder / "conf/loss/my_loss.yaml").write_text("# Mine.\ndefaults:\n  - grpo\nmargin: 1.0\n")
    words = ("loss.margin=2.0", "task.weights.part=0.5", "stepz=3")
    assert refused("train", "--config-dir=conf", "experiment=own", *words) == "error: stepz is not a setting\n"
    said = refused("train", "--config-dir=conf", "loss=my_los", "loss.margin=2.0")
    assert "did you mean my_loss?" in said and "loss.margin is not a setting" in said
    (folder / "conf/loss/my_loss.yaml").rename(folder / "conf/loss/grpo.yaml")
    for more in ([], ["--help"]):
        assert "loss/grpo.yaml has the name of one of ours" in refused("train", "--config-dir=conf", *more)
    (folder / "conf/loss/grpo.yaml").unlink()


def test_what_is_there_is_not_written_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(folder)
    for there in (folder, folder / "rules.py"):
        result = grpo("init", str(there))
        assert result.exit_code == 2 and f"{there} exists and is not an empty folder; name a new one" in result.output
    assert content(folder) == before
    (folder.parent / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(folder.parent / "empty")
        assert grpo("init", ".").exit_code == 2, "a shell would stand in a folder that is no more"
    assert grpo("init", "empty").exit_code == 0 and (folder.parent / "empty" / "rules.py").exists()
