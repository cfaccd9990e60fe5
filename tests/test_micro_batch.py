"""`train.micro_batch_tokens=auto`: decided once by what memory is free, said, kept for a resumed run, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_resume import WORDS, rows
from typer.testing import CliRunner

from grpo_cli.cli import main as cli
from grpo_cli.config.compose import settings_of
from grpo_cli.config.prepare import prepare
from grpo_cli.experiment import build
from grpo_cli.memory import fit
from grpo_cli.support import memory
from grpo_cli.support.errors import UserError

AUTO = (*WORDS, "n=16", "train.micro_batch_tokens=auto")
LITTLE = 13 * 2**20  # takes the weights, the optimizer and a few rows


def decided(monkeypatch: pytest.MonkeyPatch, free: int, *words: str) -> tuple[int, str]:
    """The number where so many bytes are free, and what is said of it."""
    said: list[str] = []
    monkeypatch.setattr(fit, "room_of", lambda *given: free)
    monkeypatch.setattr(fit, "process_alone", lambda device: 0)
    values = fit.decided(prepare(settings_of(*AUTO, *words), said.append), frozenset(), said.append)
    assert values.keys() == {fit.TOKENS}
    return values[fit.TOKENS], "\n".join(said)


def grpo(*words: str) -> Any:
    result = CliRunner().invoke(cli.app, ["train", *words], prog_name="grpo")
    assert result.exit_code == 0, result.output
    return result


def test_it_is_all_of_a_step_or_the_most_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    everything, said = decided(monkeypatch, 2**40)
    # 2 prompts of 6 to 16 tokens, each once, and 16 rollouts of each of 12 tokens at most
    assert 2 * 6 + 32 * 12 <= everything <= 2 * 16 + 32 * 12
    assert f"{fit.TOKENS}={everything} " in said
    few, said = decided(monkeypatch, LITTLE)
    assert 6 + 12 < few < everything and f"{fit.TOKENS}={few} " in said
    assert few < decided(monkeypatch, LITTLE, "model.gradient_checkpointing=full")[0]


def test_a_task_of_ones_own_files_is_asked_for_its_prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = [json.dumps({"question": f"What is {i} and 1?", "answer": f"#### {i + 1}"}) for i in range(40)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    path = tmp_path / "sums.jsonl"
    everything, _ = decided(monkeypatch, 2**40, "task=gsm8k", f"task.path={path}")
    assert everything > 32 * 12


def test_where_not_one_sequence_fits_it_says_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as refused:
        decided(monkeypatch, 0)
    for lever in (fit.TOKENS, "model.gradient_checkpointing=full", "model.lora.rank=16", "sampling.max_new_tokens"):
        assert lever in str(refused.value)


def test_a_resumed_run_cuts_as_before_whatever_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    few, _ = decided(monkeypatch, LITTLE)
    begun = grpo(*AUTO, "train.steps=2", "hydra.run.dir=cut")
    assert f"{fit.TOKENS}={few} " in begun.stderr
    record = json.loads(Path("cut/run.json").read_text())
    assert record["config"]["train"]["micro_batch_tokens"] == few
    monkeypatch.setattr(fit, "room_of", lambda *given: 2**40)
    again = grpo("resume=cut", "train.steps=4")
    assert "micro_batch_tokens" not in again.stderr
    grpo(*WORDS, "n=16", "train.steps=4", f"train.micro_batch_tokens={few}", "hydra.run.dir=whole")
    assert rows(Path("cut")) == rows(Path("whole"))


def test_what_is_built_without_the_command_line_wants_a_number(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train.micro_batch_tokens=auto is decided by the command line"):
        build(settings_of(*AUTO, f"run_dir={tmp_path}"))


def test_a_control_group_and_those_around_it_bound_what_is_free(tmp_path: Path) -> None:
    for group, most in (("a", "5000"), ("a/b", "max"), ("", "100000")):
        folder = tmp_path / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text("3000\n")
        (folder / "memory.stat").write_text("anon 2000\ninactive_file 700\n")

    def found(path: str) -> list[tuple[int, int]]:
        (tmp_path / "own").write_text(f"7:cpuset:/a\n0::{path}\n")
        return [(one.limit, one.used) for one in memory._control_groups(tmp_path / "own", tmp_path / "cgroup")]

    assert found("/a/b") == [(5000, 2300), (100000, 2300)]
    assert found("/elsewhere/in/a/container") == [(100000, 2300)]
    assert list(memory._control_groups(tmp_path / "none", tmp_path)) == []
