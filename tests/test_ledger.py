"""Rows of a run's records that are missing, doubled or altered since a checkpoint are noticed."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

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
    tracker.keep()(checkpoint)
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


# Lines of metrics.jsonl are of steps 0 1 2 3, those of rollouts.jsonl of 1 1 2 2 3 3; what is of step 4 is later.
DAMAGES: dict[str, Damage] = {
    "one is missing": without(2),
    "all are gone": without(*range(9)),
    "one is doubled": lambda lines: [*lines[:2], lines[1], *lines[2:]],
    "a digit": with_line(2, lambda line: line.replace(b"5", b"6")),
    "a later step": with_line(2, lambda line: line.replace(b": 2", b": 7")),
    "no step": with_line(2, lambda line: line.replace(b": 2", b": -2")),
    "a hole between lines": with_line(2, lambda line: line[:9]),
    "the file cut short": lambda lines: [*lines[:2], lines[2][:9]],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl"])
def test_rows_that_are_not_those_written_are_refused_and_kept_only_if_asked(
    tmp_path: Path, name: str, damage: Damage
) -> None:
    checkpoint, path = written(tmp_path), tmp_path / name
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"{name} .*accept_damage=true"):
        resumed(tmp_path, checkpoint)
    assert path.read_bytes() == before
    warnings: list[str] = []
    tracker = resumed(tmp_path, checkpoint, warnings, accept=True)
    assert warnings and all(f"accepted damage: {name}" in warning for warning in warnings)
    kept = path.read_bytes()
    assert kept == b"" or kept.endswith(b"\n")
    assert {*kept.splitlines()} <= {*before.splitlines()} and b'{"step": 4' not in kept
    tracker.log(record(4))
    later = tmp_path / "checkpoints" / "step_000004"
    later.mkdir()
    tracker.keep()(later)
    resumed(tmp_path, later).log(record(5))  # what was accepted is not told again


def test_steps_that_are_gone_are_in_the_summary_of_a_run_that_goes_on_without_them(tmp_path: Path) -> None:
    checkpoint, path = written(tmp_path), tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{}\n", *lines[3:]]))
    assert resumed(tmp_path, checkpoint, accept=True).missing == [1, 2]


def test_rows_as_they_were_written_go_on_and_later_ones_are_cut_off(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, after=2)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    tracker = resumed(tmp_path, checkpoint)
    assert steps(tmp_path / "metrics.jsonl") == [0, 1, 2, 3]
    assert steps(tmp_path / "rollouts.jsonl") == [1, 1, 2, 2, 3, 3]
    tracker.log(record(4))
    tracker.log(record(4))  # a failure asks for what it does not know to be written
    assert steps(tmp_path / "metrics.jsonl") == [0, 1, 2, 3, 4] and tracker.missing == []


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
    tracker.keep()(checkpoint)
    again = resumed(tmp_path, checkpoint)  # which is as it was written: nothing to refuse
    assert tracker.missing == again.missing == [1]
    again.log(record(3))
    assert steps(tmp_path / "metrics.jsonl") == [0, 2, 3] and steps(tmp_path / "rollouts.jsonl") == [2, 2, 3, 3]


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
