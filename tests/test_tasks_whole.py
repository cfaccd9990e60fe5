"""Whole runs on files of one's own: from the words on the command line to the rewards in the records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_hf import make_folder
from typer.testing import CliRunner, Result

from grpo_cli.cli import main as cli

SMALL = ["n=2", "m=2", "train.steps=1", "train.prompts=2", "eval.problems=2", "eval.k=1", "logger=jsonl", "device=cpu"]
FUNCTION = """
def score(reply, answer, row):
    return {"correct": float(answer in reply), "words": 0.1 * reply.count(" "), "level": row["level"]}
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "model")
    rows = [{"question": f"{i}+{i}?", "answer": str(2 * i), "level": i} for i in range(8)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards_of_a_run.py").write_text(FUNCTION)
    return tmp_path


def grpo(command: str, *words: str) -> Result:
    given = ["model=hf", "model.path=model", "task=jsonl", "task.path=mine.jsonl", "sampling.max_new_tokens=12"]
    return CliRunner().invoke(cli.app, [command, *given, "hydra.run.dir=run", *words], prog_name="grpo")


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_rewarded_by_ones_own_function_and_ends_replies_at_stop_strings(elsewhere: Path) -> None:
    letters = "[" + ",".join("abcdefghijklmnopqrstuvwxyz") + "]"
    result = grpo("train", *SMALL, "task.reward=rewards_of_a_run:score", "task.few_shot=1", f"sampling.stop={letters}")
    assert result.exit_code == 0, result.output
    metrics = records(elsewhere / "run" / "metrics.jsonl")[-1]
    assert {"reward/correct", "reward/words", "reward/level"} <= metrics.keys()
    rollouts = records(elsewhere / "run" / "rollouts.jsonl")
    ended = [str(r["reply"]) for r in rollouts if r["finish"] == "stop"]
    assert all(any(letter.isascii() and letter.islower() for letter in reply) for reply in ended)
    again = CliRunner().invoke(cli.app, ["eval", "checkpoint=run", "eval.problems=1", "eval.k=1", "hydra.run.dir=e"])
    assert again.exit_code == 0, again.output  # the run's stop strings and function come along


def test_eval_takes_all_of_a_file_that_is_named_to_it(elsewhere: Path) -> None:
    result = grpo("eval", "eval.problems=-1", "eval.k=1", "device=cpu")
    assert result.exit_code == 0, result.output
    assert json.loads((elsewhere / "run" / "summary.json").read_text())["problems"] == 8
    words = ("task.eval_fraction=0.25", "hydra.run.dir=share")
    result = grpo("eval", "eval.problems=-1", "eval.k=1", "device=cpu", *words)
    assert json.loads((elsewhere / "share" / "summary.json").read_text())["problems"] == 2
