"""A learning rate that settings given on resume change is said; one that they do not change is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_seams import quiet
from test_train import make_trainer, settings_for

from grpo_cli.runs.checkpoint import load_state

# A run of 4 steps at rate 0.01, resumed after 2 with these words changed: the next update's rate, and what was to be.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, str, str]] = [
    ("linear", {"steps": 8}, {}, "0.0075", "0.005", "train.steps=8 (was 4)"),
    ("cosine", {"steps": 8}, {}, "0.00854", "0.005", "train.steps=8 (was 4)"),
    ("constant", {}, {"lr": 0.02}, "0.02", "0.01", "optim.lr=0.02 (was 0.01)"),
    ("constant", {}, {"warmup_steps": 4}, "0.0075", "0.01", "optim.warmup_steps=4 (was 0)"),
    ("linear", {}, {"schedule": "constant"}, "0.01", "0.005", "optim.schedule=constant (was linear)"),
    ("linear", {"steps": 8}, {"lr": 0.02}, "0.015", "0.005", "optim.lr=0.02 (was 0.01), train.steps=8 (was 4)"),
]


def warned(folder: Path, schedule: str, train: dict[str, Any], optim: dict[str, Any], step: int = 2) -> list[str]:
    settings = quiet(settings_for(folder, steps=4))
    settings = replace(settings, optim=replace(settings.optim, schedule=schedule))
    make_trainer(settings).fit()
    changed = replace(settings, train=replace(settings.train, **train), optim=replace(settings.optim, **optim))
    warnings: list[str] = []
    make_trainer(changed, checkpoint=folder / "checkpoints" / f"step_{step:06d}", warn=warnings.append)
    return warnings


@pytest.mark.parametrize(("schedule", "train", "optim", "now", "then", "keys"), CASES, ids=str)
def test_a_rate_that_jumps_is_said_with_both_numbers_and_the_keys(
    schedule: str, train: dict[str, Any], optim: dict[str, Any], now: str, then: str, keys: str, tmp_path: Path
) -> None:
    (warning,) = warned(tmp_path, schedule, train, optim)
    assert warning == (
        f"the learning rate of the next update is {now}, and would have been {then} under the settings that this run "
        f"was saved with: {keys}"
    )


def test_a_finished_schedule_that_is_made_longer_starts_again_from_above_zero(tmp_path: Path) -> None:
    (warning,) = warned(tmp_path, "linear", {"steps": 8}, {}, step=4)
    assert "next update is 0.005, and would have been 0 " in warning


@pytest.mark.parametrize(
    ("schedule", "train", "optim"), [("constant", {"steps": 8}, {}), ("linear", {}, {"weight_decay": 0.1})], ids=str
)
def test_a_rate_that_goes_on_is_not_worth_a_word(
    schedule: str, train: dict[str, Any], optim: dict[str, Any], tmp_path: Path
) -> None:
    assert warned(tmp_path, schedule, train, optim) == []


def test_a_checkpoint_that_does_not_know_its_schedule_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(folder: Path) -> dict[str, Any]:
        return {name: value for name, value in load_state(folder).items() if name != "schedule"}

    monkeypatch.setattr("grpo_cli.train.load_state", without)
    assert warned(tmp_path, "linear", {"steps": 8}, {}) == []
