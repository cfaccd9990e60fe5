"""train.checkpoint=lazy: what is written in the background is what was there when the save began, to the byte; training
waits for the copy alone, and an error is raised at the next place that joins."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from small import small_model
from test_learner import make_batch, make_learner
from test_resume import WORDS, records, trained

from grpo_cli.config.compose import settings_of
from grpo_cli.experiment import build
from grpo_cli.model.load import save_pretrained
from grpo_cli.runs import background
from grpo_cli.runs.background import Saver
from grpo_cli.runs.checkpoint import load_state
from grpo_cli.runs.find import find_checkpoint
from grpo_cli.runs.stop import Stopped
from grpo_cli.support.errors import UserError

MOVES = ("n=16", "train.prompts=4", "sampling.max_new_tokens=32", "task.train_problems=8")  # weights
LAZY = ("train.checkpoint=lazy", "train.checkpoint_every=1")


def copied_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made when an update asks for it, or the end: as late as it may be."""
    asked = threading.Event()
    copy, settle, join = background._copy, Saver.wait_until_copied, Saver.join

    def late(*arguments: Any) -> None:
        asked.wait(10)
        asked.clear()
        copy(*arguments)

    def then(method: Any) -> Any:
        def call(one: Saver) -> None:
            asked.set()
            method(one)
            asked.clear()

        return call

    monkeypatch.setattr(background, "_copy", late)
    monkeypatch.setattr(Saver, "wait_until_copied", then(settle))
    monkeypatch.setattr(Saver, "join", then(join))


def test_a_run_records_and_keeps_what_it_does_without(tmp_path, monkeypatch):
    copied_late(monkeypatch)
    ran: tuple[list[Any], ...] = [], []
    for name, more, rows in (("now", ("train.checkpoint_every=1",), ran[0]), ("lazy", LAZY, ran[1])):
        trained(tmp_path / name, "train.keep_checkpoints=9", *MOVES, *more)
        states = [load_state(tmp_path / name / "checkpoints" / f"step_{step:06d}") for step in range(3)]
        rows += [state["optimizer"]["state"].get("model.norm.weight") for state in states]
    assert records(tmp_path / "now") == records(tmp_path / "lazy")
    for now, lazy in zip(ran[0][1:], ran[1][1:], strict=True):
        assert now.keys() == lazy.keys() and all(torch.equal(now[key], lazy[key]) for key in now)


def test_what_a_signal_does_not_wait_for_is_waited_for_later(monkeypatch):
    written, go = list[int](), threading.Event()
    saver = Saver(True, lambda name: nullcontext())
    saver.save({}, lambda _: (go.wait(5), written.append(1)))
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(background, "wait", lambda futures: (_ for _ in ()).throw(Stopped))
        saver.join()
    go.set()
    saver.join()
    assert written == [1]


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_full_disk_is_named_by_the_next_save_or_the_end(tmp_path, monkeypatch, fails_at):
    """Steps 0 to 3 are saved; the writing of the last one fails at the end of the run, that of others before it."""

    def save(model: Any, tokenizer: Any, folder: Path, *more: Any, **words: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if int(folder.name.removesuffix(".tmp")[6:]) >= fails_at:
            raise OSError(28, "No space left on device")
        save_pretrained(model, tokenizer, folder, *more, **words)

    monkeypatch.setattr("grpo_cli.experiment.save_pretrained", save)
    words = (*WORDS, "train.steps=3", *LAZY, f"run_dir={tmp_path}")
    trainer = build(settings_of(*words))
    with pytest.raises(match=f"step_00000{fails_at} cannot be written .*No space left"):
        trainer.fit()
    assert find_checkpoint(tmp_path).path == tmp_path / "checkpoints" / f"step_{fails_at - 1:06d}"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and not list((tmp_path / "checkpoints").glob(".*.tmp"))


def test_a_step_that_fails_leaves_the_checkpoint_that_was_being_written(tmp_path, monkeypatch):
    failed = threading.Event()
    late = lambda *given, **words: (failed.wait(60), save_pretrained(*given, **words))  # noqa: E731
    monkeypatch.setattr("grpo_cli.experiment.save_pretrained", late)
    monkeypatch.setattr("grpo_cli.learner.learner.Learner.update", lambda *_: (failed.set(), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, *LAZY)
    assert find_checkpoint(tmp_path).path == tmp_path / "checkpoints" / "step_000000"


def test_the_optimizer_s_state_is_kept_by_the_names_of_weights():
    model = small_model()
    learner = make_learner(model)
    learner.update(make_batch(), 0)
    state = learner.state_dict()
    names = {name for name, _ in model.named_parameters()}
    assert set(state["state"]) == names == {name for group in state["param_groups"] for name in group["params"]}
    again = make_learner(small_model())
    changed = {**state, "state": {"other.lora_A": {}}, "param_groups": [{"params": ["other.lora_A"]}]}
    with pytest.raises(UserError, match=r"has 1 weights that this run does not train \(other.lora_A\): resume with"):
        again.load_state_dict(changed)
