"""A learning rate that settings given on resume change is said; one that they do not change is not."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_seams import quiet
from test_train import make_trainer, settings_for

from grpo_cli.runs.checkpoint import load_state
from grpo_cli.settings import RunSettings

# A run of 4 steps at rate 0.01, resumed after 2 (or 4) with these words changed: the next update's rate, and what was
# to be; nothing of a rate that does not jump.
CASES: list[tuple[int, str, dict[str, Any], dict[str, Any], str]] = [
    (2, "linear", {"steps": 8}, {}, "0.0075, 0.005, train.steps=8 (was 4)"),
    (2, "cosine", {"steps": 8}, {}, "0.00854, 0.005, train.steps=8 (was 4)"),
    (2, "constant", {}, {"lr": 0.02}, "0.02, 0.01, optim.lr=0.02 (was 0.01)"),
    (2, "constant", {}, {"warmup_steps": 4}, "0.0075, 0.01, optim.warmup_steps=4 (was 0)"),
    (2, "linear", {}, {"schedule": "constant"}, "0.01, 0.005, optim.schedule=constant (was linear)"),
    (2, "linear", {"steps": 8}, {"lr": 0.02}, "0.015, 0.005, optim.lr=0.02 (was 0.01), train.steps=8 (was 4)"),
    (4, "linear", {"steps": 8}, {}, "0.005, 0, train.steps=8 (was 4)"),  # a finished schedule that is made longer
    (2, "constant", {"steps": 8}, {}, ""),
    (2, "linear", {}, {"weight_decay": 0.1}, ""),
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunSettings]:
    """Settings of a run with this schedule that has done its steps."""

    @functools.cache
    def run(schedule: str) -> RunSettings:
        settings = quiet(settings_for(tmp_path_factory.mktemp("run"), steps=4))
        settings = replace(settings, optim=replace(settings.optim, schedule=schedule))
        make_trainer(settings).fit()
        return settings

    return run


@pytest.mark.parametrize(("step", "schedule", "train", "optim", "expected"), CASES, ids=str)
def test_a_rate_that_jumps_is_named_with_both_numbers_and_the_keys(
    begun: Callable[[str], RunSettings],
    step: int,
    schedule: str,
    train: dict[str, Any],
    optim: dict[str, Any],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, warnings = begun(schedule), list[str]()
    changed = replace(settings, train=replace(settings.train, **train), optim=replace(settings.optim, **optim))
    checkpoint = Path(settings.run_dir) / "checkpoints" / f"step_{step:06d}"
    make_trainer(changed, checkpoint=checkpoint, warn=warnings.append)
    pattern = (
        r".* next update is (\S+), and would have been (\S+) under the settings that this run was saved with: (.*)"
    )
    assert [", ".join(re.fullmatch(pattern, line).groups()) for line in warnings] == [expected] * bool(expected)  # type: ignore[union-attr]
    without = {name: value for name, value in load_state(checkpoint).items() if name != "schedule"}
    monkeypatch.setattr("grpo_cli.train.load_state", lambda folder: without)
    make_trainer(changed, checkpoint=checkpoint, warn=pytest.fail)  # it does not know its schedule
