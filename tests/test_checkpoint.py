"""A checkpoint is whole or it is not one: after a kill, a full disk and damage the last good one is found and named."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_cli.runs import checkpoint, layout
from grpo_cli.runs.checkpoint import clear_leftovers, damaged, load_state, remove_from, save_checkpoint
from grpo_cli.runs.find import completed_steps, find_checkpoint, resolve_run
from grpo_cli.runs.lock import sole_use
from grpo_cli.support.errors import UserError


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a b c")


def save(root: Path, step: int, keep: int = 9, model: Callable[[Path], None] = write_model, **state: Any) -> Path:
    save_checkpoint(root, step, model, {"step": step, **state}, keep)
    return root / f"step_{step:06d}"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_was_saved_is_found_and_loaded_and_the_last_few_are_kept(tmp_path):
    """Never fewer than the one just written, and complete ones alone are counted."""
    root = tmp_path / "run" / "checkpoints"
    assert find_checkpoint(root).path is None
    path = save(root, 100, optimizer={"state": {0: torch.arange(3.0)}}, cursor=(1, 2), words=OrderedDict(a=None))
    assert path == root / "step_000100" and names(root) == ["step_000100"]
    assert names(path) == ["COMPLETE", "config.json", "tokenizer", "trainer_state.pt"]
    assert {find_checkpoint(folder).path for folder in (root.parent, root, path)} == {path}
    assert find_checkpoint(root / "step_000099").skipped == ("step_000099: there is no such folder",)
    loaded = load_state(path)
    assert torch.equal(loaded["optimizer"]["state"][0], torch.arange(3.0))
    assert loaded["cursor"] == (1, 2) and loaded["words"] == {"a": None} and loaded["step"] == 100
    for step in (101, 102, 103):
        save(root, step, keep=2)
    assert names(root) == ["step_000102", "step_000103"]
    remove_from(root, 103)
    assert names(root) == ["step_000102"]
    (root / "step_000102" / "COMPLETE").unlink()
    save(root, 103, keep=1)
    assert names(root) == ["step_000102", "step_000103"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("trainer_state.pt", truncate, "trainer_state.pt has changed"),
        ("tokenizer/vocab.txt", lambda path: path.write_text("a b d"), "tokenizer/vocab.txt has changed"),
        ("config.json", Path.unlink, "config.json is missing"),
        ("COMPLETE", Path.unlink, "the save was interrupted"),
        ("COMPLETE", truncate, "COMPLETE is damaged"),
        ("COMPLETE", lambda path: path.write_text('{"files": {}}'), "COMPLETE does not list trainer_state.pt"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_by_name_and_reason(tmp_path, name, damage, reason):
    save(tmp_path, 1)
    damage(save(tmp_path, 2) / name)
    found = find_checkpoint(tmp_path)
    assert found.path == tmp_path / "step_000001"
    assert len(found.skipped) == 1 and found.skipped[0].startswith(f"step_000002: {reason}")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_a_save_that_fails_leaves_no_trace_and_says_why(tmp_path, error):
    save(root := tmp_path / "checkpoints", 1)

    def broken(folder: Path) -> None:
        write_model(folder)
        raise error

    full = isinstance(error, OSError)
    with pytest.raises(UserError if full else type(error), match="cannot be written .No space" if full else None):
        save(root, 2, keep=1, model=broken)
    assert names(root) == ["step_000001"] and find_checkpoint(root).path == root / "step_000001"


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from grpo_cli.runs.checkpoint import save_checkpoint

def save(root, step, mark, keep):
    def model(folder):
        for name in ("a", "b"):
            (folder / name).write_text(mark)
    save_checkpoint(root, step, model, {"mark": mark}, keep)

def die_at(moment):
    calls = iter(range(10_000))
    def dying(function):
        def call(*arguments, **options):
            if next(calls) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)
        return call
    for name in ("fsync", "replace", "unlink", "rmdir", "mkdir", "open"):
        setattr(os, name, dying(getattr(os, name)))

base = Path(sys.argv[1]) / "base" / "checkpoints"
save(base, 1, "one", 2)
save(base, 2, "two", 2)
for moment in range(10_000):
    root = Path(sys.argv[1]) / str(moment) / "checkpoints"
    shutil.copytree(base, root)
    if (child := os.fork()) == 0:
        try:
            die_at(moment)
            save(root, 2, "again", 1)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != -signal.SIGKILL:
        break
print(status, moment)
"""


def test_a_kill_at_any_moment_leaves_a_good_checkpoint(tmp_path):
    result = subprocess.run([sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True)
    status, moments = map(int, result.stdout.split())
    assert status == 0 and moments > 15, result.stderr
    marks = []
    for moment in range(moments):
        root = tmp_path / str(moment) / "checkpoints"
        path = find_checkpoint(root).path
        assert path is not None
        marks.append(load_state(path)["mark"])
        clear_leftovers(root.parent)
        assert all(find_checkpoint(root / name).path for name in names(root)), "nothing half deleted comes back"
        save(root, 3, keep=1)
        assert names(root) == ["step_000003"]
    # First the old one is found, from some moment on the new one; never the one before, though it is still there.
    assert set(marks) == {"two", "again"} and marks == sorted(marks, reverse=True)


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("exploded",)


def test_a_state_holds_and_runs_no_code(tmp_path, monkeypatch):
    """What safe loading would refuse is refused when saving."""
    for value in (np.float64(1.0), np.zeros(2), Path("x"), print):
        with pytest.raises(TypeError, match="tensors and plain values only"):
            save(tmp_path / "checkpoints", 1, a=[1, value])
    assert names(tmp_path / "checkpoints") == []
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Bomb()}, tmp_path / "trainer_state.pt")
    with pytest.raises(UserError, match="is damaged"):
        load_state(tmp_path)
    assert not (tmp_path / "exploded").exists()
    with pytest.raises(UserError, match=r"^a refusal$"), damaged(tmp_path):  # of what a rule has learnt
        raise UserError("a refusal")


def test_auto_is_the_run_that_saved_last_and_has_something_good(tmp_path, monkeypatch):
    """A finished one only where all are."""
    monkeypatch.chdir(tmp_path)
    train = tmp_path / "outputs" / "train"
    for run in ("2026-01-02", "2026-01-01", "sweep/0"):
        save(train / run / "checkpoints", 7)
    (train / "2026-01-03" / "checkpoints").mkdir(parents=True)
    truncate(save(train / "damaged" / "checkpoints", 1) / "config.json")
    (train / "2026-01-02" / "summary.json").write_text('{"status": "completed"}')
    assert (completed_steps(train / "2026-01-02"), completed_steps(train / "2026-01-01")) == (7, None)
    with sole_use(train / "sweep/0", print):
        assert resolve_run("auto") == train / "2026-01-01"
    for run in ("sweep/0", "2026-01-01", "2026-01-02"):
        assert resolve_run("auto") == train / run
        shutil.rmtree(train / run)


def test_a_step_s_folder_tells_its_step_also_while_it_is_written():
    for step, name in ((step, layout.step_folder(step)) for step in (0, 100, 1_000_000)):
        assert layout.step_of(name) == layout.step_of(f".{name}{layout.UNFINISHED}") == step
    assert {layout.step_of(name) for name in ("best", "step_", "step_1.bak", "a_step_1", "step_1 ")} == {None}


def test_random_states_continue_where_they_were(tmp_path):
    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), random.gauss(0, 1)

    before = checkpoint.rng_state()
    draw()  # leaves half a pair of normal numbers behind, twice: both are part of the state
    state, expected = checkpoint.rng_state(), draw()
    path = save(tmp_path, 1, rng=state)
    draw()
    checkpoint.set_rng_state(load_state(path)["rng"])
    assert draw() == expected
    checkpoint.set_rng_state(before)
