"""Rows of a run's records that are missing, doubled or altered since a checkpoint are named by file, line and step."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_cli.runs.ledger import Ledger, StepRows, load_ledgers, save_ledgers
from grpo_cli.support.errors import UserError
from grpo_cli.tracking.jsonl import JsonlTracker
from grpo_cli.types import Example, Record

Damage = Callable[[list[bytes]], list[bytes]]


def record(step: int) -> Record:
    """The first has no rollouts, as an evaluation has none; the others have two."""
    kept = Example(f"p{step}", 0, "1+1=", "2", "2", 1.0, True, {}, 1, "eos", True, "kept", 0.5)
    return Record(step, {"loss/total": step / 8}, (kept, kept) if step else ())


def written(run: Path, last: int = 3, after: int = 1) -> Path:
    """A run's folder with steps 0 to `last`, their checkpoint, and steps that came after it. Returns the checkpoint."""
    tracker, checkpoint = JsonlTracker(run), run / "checkpoints" / f"step_{last:06d}"
    checkpoint.mkdir(parents=True)
    for step in range(last + 1):
        tracker.log(record(step))
    tracker.keep(checkpoint)
    for step in range(last + 1, last + 1 + after):
        tracker.log(record(step))
    return checkpoint


def resumed(run: Path, checkpoint: Path, warnings: list[str] | None = None, accept: bool = False) -> JsonlTracker:
    last = int(checkpoint.name.removeprefix("step_"))
    said = [] if warnings is None else warnings
    return JsonlTracker(run, last + 1, said.append, checkpoint, accept)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def without(*places: int) -> Damage:
    return lambda lines: [line for place, line in enumerate(lines) if place not in places]


def with_line(place: int, change: Callable[[bytes], bytes]) -> Damage:
    return lambda lines: [*lines[:place], change(lines[place]), *lines[place + 1 :]]


def moved(place: int, to: int, copies: int = 1) -> Damage:
    """A line put elsewhere; with `copies` of 2 it stays where it was as well."""

    def change(lines: list[bytes]) -> list[bytes]:
        rest = lines if copies == 2 else without(place)(lines)
        return [*rest[:to], lines[place], *rest[to:]]

    return change


def ending_in(place: int) -> Damage:
    """The file ends in the middle of a line."""
    return lambda lines: [*lines[:place], lines[place][:9]]


# Lines of metrics.jsonl are of steps 0 1 2 3, those of rollouts.jsonl of 1 1 2 2 3 3; what is of step 4 is later.
DAMAGES: dict[str, tuple[str, Damage, str]] = {
    "metrics: missing": ("metrics.jsonl", without(2), "metrics.jsonl, line 3 (step 2): missing"),
    "metrics: the last missing": ("metrics.jsonl", without(3), "metrics.jsonl, line 4 (step 3): missing"),
    "metrics: all gone": ("metrics.jsonl", without(0, 1, 2, 3, 4), "line 1 (step 0): missing; metrics.jsonl, line 2"),
    "metrics: doubled": ("metrics.jsonl", moved(2, 2, copies=2), "lines 3-4 (step 2): doubled, 1 of 2 lines belong"),
    "metrics: doubled elsewhere": ("metrics.jsonl", moved(2, 1, 2), "line 2 and line 4 (step 2): doubled"),
    "metrics: swapped": ("metrics.jsonl", moved(1, 2), "line 2 (step 2): out of order, step 1 belongs there"),
    "metrics: a digit": ("metrics.jsonl", with_line(2, lambda b: b.replace(b"0.25", b"0.26")), "3 (step 2): altered"),
    "metrics: a step": ("metrics.jsonl", with_line(2, lambda b: b.replace(b": 2", b": 1")), "line 3 (step 2): missing"),
    "metrics: a later step": (
        "metrics.jsonl",
        with_line(2, lambda b: b.replace(b": 2", b": 7")),
        "line 3 (step 2): mi",
    ),
    "metrics: a line cut": ("metrics.jsonl", with_line(2, lambda b: b[:9] + b"\n"), "line 3 (step 2): damaged"),
    "metrics: a hole": ("metrics.jsonl", with_line(2, lambda b: b[:9]), "metrics.jsonl, line 3 (step 2): damaged"),
    "metrics: the file cut": (
        "metrics.jsonl",
        ending_in(2),
        "line 3 (step 2): missing; metrics.jsonl, line 4 (step 3)",
    ),
    "metrics: a huge step": (
        "metrics.jsonl",
        with_line(2, lambda b: b.replace(b": 2", b": -2")),
        "3 (step 2): damaged",
    ),
    "rollouts: missing": ("rollouts.jsonl", without(2, 3), "rollouts.jsonl, lines 3-4 (step 2): missing"),
    "rollouts: one missing": ("rollouts.jsonl", without(3), "line 3 (step 2): 1 of the step's 2 lines are missing"),
    "rollouts: doubled": ("rollouts.jsonl", moved(3, 3, copies=2), "lines 3-5 (step 2): doubled, 2 of 3 lines belong"),
    "rollouts: out of order": ("rollouts.jsonl", moved(1, 2), "line 1 and line 3 (step 1): out of order"),
    "rollouts: a digit": ("rollouts.jsonl", with_line(3, lambda b: b.replace(b"0.5", b"0.6")), "3-4 (step 2): altered"),
    "rollouts: a hole": ("rollouts.jsonl", with_line(2, lambda b: b[:9]), "line 3 (step 2): 1 of the step's 2 lines"),
    "rollouts: the file cut": ("rollouts.jsonl", ending_in(4), "rollouts.jsonl, lines 5-6 (step 3): missing"),
}


@pytest.mark.parametrize(("name", "damage", "told"), DAMAGES.values(), ids=DAMAGES)
def test_rows_that_are_not_those_written_are_named_and_kept_only_if_asked(
    tmp_path: Path, name: str, damage: Damage, told: str
) -> None:
    checkpoint, path = written(tmp_path), tmp_path / name
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    with pytest.raises(UserError, match="accept_damage=true") as refused:
        resumed(tmp_path, checkpoint)
    assert told in str(refused.value)
    assert path.read_bytes() == before
    warnings: list[str] = []
    tracker = resumed(tmp_path, checkpoint, warnings, accept=True)
    assert warnings and all(warning.startswith(f"damage is accepted, and stays: {name}, ") for warning in warnings)
    kept = path.read_bytes()
    assert kept == b"" or kept.endswith(b"\n")
    assert {*kept.splitlines()} <= {*before.splitlines()}
    tracker.log(record(4))
    later = tmp_path / "checkpoints" / "step_000004"
    later.mkdir()
    tracker.keep(later)
    resumed(tmp_path, later).log(record(5))  # what was accepted is not told again


def test_rows_as_they_were_written_go_on_and_later_ones_are_cut_off(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, after=2)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    tracker = resumed(tmp_path, checkpoint)
    assert steps(tmp_path / "metrics.jsonl") == [0, 1, 2, 3] and steps(tmp_path / "rollouts.jsonl") == [
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    tracker.log(record(4))
    tracker.log(record(4))  # a failure asks for what it does not know to be written
    assert steps(tmp_path / "metrics.jsonl") == [0, 1, 2, 3, 4] and tracker.missing == []


def test_accepted_rows_that_are_gone_count_as_missing(tmp_path: Path) -> None:
    checkpoint = written(tmp_path)
    (tmp_path / "rollouts.jsonl").unlink()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(without(1)(path.read_bytes().splitlines(keepends=True))))
    tracker = resumed(tmp_path, checkpoint, accept=True)
    assert tracker.missing == [1, 2, 3]


def test_a_record_that_a_full_disk_did_not_take_is_remembered_as_missing(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, warn=lambda text: None)
    tracker.log(record(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, hard))
    try:
        tracker.log(record(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tracker.log(record(2))
    checkpoint = tmp_path / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    tracker.keep(checkpoint)
    again = resumed(tmp_path, checkpoint)  # which is as it was written: nothing to refuse
    assert tracker.missing == again.missing == [1]
    again.log(record(3))
    assert steps(tmp_path / "metrics.jsonl") == [0, 2, 3] and steps(tmp_path / "rollouts.jsonl") == [2, 2, 3, 3]


def test_a_checkpoint_without_a_ledger_wants_each_step_of_metrics_once(tmp_path: Path) -> None:
    """A run of a version that left none; with the next checkpoint it has one."""
    checkpoint, path = written(tmp_path), tmp_path / "metrics.jsonl"
    (checkpoint / "ledger.npz").unlink()
    whole = path.read_bytes()
    path.write_bytes(b"".join(moved(2, 1, copies=2)(whole.splitlines(keepends=True))))
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2 and line 4 \(step 2\): doubled"):
        resumed(tmp_path, checkpoint)
    path.write_bytes(whole)
    tracker = resumed(tmp_path, checkpoint)
    assert steps(path) == [0, 1, 2, 3] and steps(tmp_path / "rollouts.jsonl") == [1, 1, 2, 2, 3, 3]
    tracker.keep(checkpoint)
    path.write_bytes(path.read_bytes().replace(b"0.25", b"0.26"))
    with pytest.raises(UserError, match=r"metrics.jsonl, line 3 \(step 2\): altered"):
        resumed(tmp_path, checkpoint)


def test_another_run_s_checkpoint_asks_nothing_of_the_records_here(tmp_path: Path) -> None:
    checkpoint = written(tmp_path / "one")
    JsonlTracker(tmp_path / "two", 4, pytest.fail, checkpoint).log(record(4))
    assert steps(tmp_path / "two" / "metrics.jsonl") == [4]


def test_a_run_begun_anew_in_its_folder_keeps_no_row(tmp_path: Path) -> None:
    written(tmp_path)
    JsonlTracker(tmp_path, 0).log(record(0))
    assert steps(tmp_path / "metrics.jsonl") == [0] and steps(tmp_path / "rollouts.jsonl") == []


def test_an_interrupted_write_is_taken_back_by_the_next(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(record(0))
    with open(tmp_path / "metrics.jsonl", "a") as file:  # as ctrl-C leaves it between the file and the ledger
        file.write('{"step": 1, "lo')
    tracker.log(record(1))
    assert steps(tmp_path / "metrics.jsonl") == [0, 1]


def test_a_ledger_of_ten_thousand_steps_is_small_and_comes_back_as_it_was(tmp_path: Path) -> None:
    blocks = [StepRows(step, 8, 4000 + step % 7, (step * 2654435761) % 2**32) for step in range(10_000)]
    ledger = Ledger(blocks)
    save_ledgers(tmp_path, {"metrics.jsonl": ledger, "empty.jsonl": Ledger()})
    assert (tmp_path / "ledger.npz").stat().st_size < 200_000
    found = load_ledgers(tmp_path)
    assert found is not None and list(found["metrics.jsonl"]) == blocks and list(found["empty.jsonl"]) == []
    assert (found["metrics.jsonl"].last_step, found["metrics.jsonl"].bytes) == (9999, ledger.bytes)
