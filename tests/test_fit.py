"""`fit`: what is chosen fits, costs least, leaves what is typed alone, and stays with a resumed run."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import WORDS, rows
from typer.testing import CliRunner

from grpo_cli.cli import main as cli
from grpo_cli.config.compose import settings_of
from grpo_cli.config.prepare import prepare
from grpo_cli.memory import fit
from grpo_cli.memory.planner import Planner
from grpo_cli.support.errors import UserError

RUN = (*WORDS, "n=16")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIB = 2**20


@cache
def planner(device: torch.device = CPU, *words: str) -> Planner:
    return Planner.of(prepare(settings_of(*RUN, "fit=auto", *words), lambda line: None), device)


def chosen(room: int, device: torch.device = CPU, typed: frozenset[str] = frozenset()) -> fit.Fitted:
    plans = planner(device)
    return fit.chosen(plans, room, fit.choosable(plans, typed), "fit=auto")


def grpo(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, ["train", *words], prog_name="grpo")
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_what_is_chosen_fits_and_is_needed_and_nothing_is_where_there_is_room(device: torch.device) -> None:
    whole = chosen(2**40, device)
    assert whole.values == {} and whole.plan.peak == whole.before
    peaks = [whole.before]
    for share in (0.9, 0.6, 0.4):
        room = int(share * whole.before)
        found = chosen(room, device)
        assert found.values and found.plan.peak <= room and found.before == whole.before
        for key in found.values:
            less = {name: value for name, value in found.values.items() if name != key}
            assert planner(device).plan(less).peak > room
        peaks.append(found.plan.peak)
    assert peaks == sorted(peaks, reverse=True)


def test_what_is_typed_is_not_chosen_even_if_nothing_fits_so() -> None:
    room = int(0.6 * chosen(2**40).before)
    (key, *_) = chosen(room).values
    without = chosen(room, typed=frozenset({key}))
    assert key not in without.values and without.plan.peak <= room
    with pytest.raises(UserError, match="typed"):
        chosen(room, typed=frozenset({fit.TOKENS, fit.CHUNK, fit.RECOMPUTE, fit.SLOTS}))


def test_a_refusal_names_the_least_that_would_do_and_that_does() -> None:
    with pytest.raises(UserError) as refused:
        chosen(MIB)
    least = int(str(refused.value).split("give fit=")[1].split("MiB")[0]) * MIB
    room = fit.within(least, CPU)
    assert chosen(room).plan.peak <= room
    with pytest.raises(UserError):
        chosen(room - 2 * MIB)


@pytest.mark.parametrize(("asked", "way_out"), [("0", "auto"), ("0GB", "auto"), ("1PB", "auto"), ("much", "2GB")])
def test_bad_sizes_are_refused(asked: str, way_out: str) -> None:
    settings = replace(settings_of(*RUN), fit=asked)
    with pytest.raises(UserError) as refused:
        fit.room_of(settings, CPU, 0, lambda line: None)
    assert f"fit={asked}" in str(refused.value) and way_out in str(refused.value)


def test_a_control_group_with_less_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "free_bytes", lambda device: 100 * MIB)
    monkeypatch.setattr(fit, "resident_bytes", lambda: 300 * MIB)
    said: list[str] = []
    assert fit.room_of(replace(settings_of(*RUN), fit="1GB"), CPU, 0, said.append) == 400 * MIB - fit.BESIDE
    assert "fit=1GB" in said[0] and "400.0 MiB" in said[0]
    for word in ("auto", "none"):
        assert fit.room_of(replace(settings_of(*RUN), fit=word), CPU, 0, said.append) == (300 + 90) * MIB


def test_a_resumed_run_goes_on_with_what_was_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fit, "process_alone", lambda device: 0)
    monkeypatch.setattr(fit, "room_of", lambda *given: room)
    room = int(0.7 * chosen(2**40).before)
    values = chosen(room).values
    begun = grpo(*RUN, "train.steps=2", "fit=auto", "hydra.run.dir=fitted")
    record = json.loads(Path("fitted/run.json").read_text())
    for key, value in values.items():
        group, name = key.split(".")
        assert record["config"][group][name] == value and f"{key}={value}".lower() in begun.stderr.lower()
        assert not any(word.startswith(key) for word in record["overrides"])
    monkeypatch.setattr(fit, "chosen", lambda *given: pytest.fail("a resumed run was planned again"))
    again = grpo("resume=fitted", "train.steps=4", "fit=3GB").stderr
    assert "fit=auto is 3GB" in again
    typed = [f"{key}={str(value).lower()}" for key, value in values.items()]
    sampler = ["sampler=infinite"] if fit.SLOTS in values else []
    grpo(*RUN, "train.steps=4", *sampler, *typed, "hydra.run.dir=whole")
    assert rows(Path("fitted")) == rows(Path("whole"))


def test_a_profile_reports_what_the_fit_of_its_run_would_choose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*RUN, "fit=700MiB", "profile.plan_only=true", "eval.every=0", "hydra.run.dir=out"]
    result = CliRunner().invoke(cli.app, ["profile", *words], prog_name="grpo")
    assert result.exit_code == 0 and "fit=700MiB: at most" in result.stderr
    assert f"{int(0.95 * 700)}.0 MiB" in result.stderr  # less than 700 - 32
    assert json.loads(Path("out/profile.json").read_text())["fit"]["room_bytes"] == 700 * MIB
