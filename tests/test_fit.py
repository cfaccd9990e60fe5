"""`fit` and `train.micro_batch_tokens=auto`: what is chosen fits, costs least, leaves what is typed alone, is reported,
and stays with a resumed run."""

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
from grpo_cli.experiment import build
from grpo_cli.memory import fit
from grpo_cli.memory.planner import Planner
from grpo_cli.support import memory
from grpo_cli.support.errors import UserError

RUN = (*WORDS, "n=16")
AUTO = f"{fit.TOKENS}=auto"
CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIB = 2**20
LITTLE = 13 * MIB  # takes the weights, the optimizer and a few rows


@cache
def planner(device: torch.device = CPU, *words: str) -> Planner:
    return Planner.of(prepare(settings_of(*RUN, "fit=auto", *words)), device)


def chosen(room: int, device: torch.device = CPU, typed: frozenset[str] = frozenset()) -> fit.Fitted:
    plans = planner(device)
    return fit.chosen(plans, room, fit.choosable(plans, typed), "fit=auto")


def tokens_chosen(room: int, *words: str) -> int:
    found: int = fit.chosen(planner(CPU, AUTO, *words).of_updates, room, {fit.TOKENS}, AUTO).values[fit.TOKENS]
    return found


def grpo(*words: str, command: str = "train") -> Any:
    result = CliRunner().invoke(cli.app, [command, *words], prog_name="grpo")
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_what_is_chosen_fits_and_is_needed_and_nothing_is_where_there_is_room(device: torch.device) -> None:
    whole = chosen(2**40, device)
    assert whole.values == {} and whole.plan.peak == whole.before
    peaks = [whole.before]
    for share in (0.6, 0.4):
        room = int(share * whole.before)
        found = chosen(room, device)
        assert found.values and found.plan.peak <= room and found.before == whole.before
        for key in found.values.keys() - {fit.OFFLOAD}:  # of what is recomputed
            without = {key, fit.OFFLOAD} if key == fit.RECOMPUTE else {key}
            less = {name: value for name, value in found.values.items() if name not in without}
            assert planner(device).plan(less).peak > room
        peaks.append(found.plan.peak)
    assert peaks == sorted(peaks, reverse=True)


def test_what_is_typed_is_not_chosen_but_for_an_automatic_micro_batch() -> None:
    room = int(0.6 * chosen(2**40).before)
    (key, *_) = chosen(room).values
    without = chosen(room, typed=frozenset({key}))
    assert key not in without.values and without.plan.peak <= room
    with pytest.raises(UserError, match="typed"):
        chosen(room, typed=frozenset({fit.TOKENS, fit.CHUNK, fit.RECOMPUTE, fit.SLOTS}))
    assert fit.TOKENS in fit.choosable(planner(CPU, AUTO), {fit.TOKENS})


def test_a_refusal_names_the_least_that_would_do_and_that_does() -> None:
    with pytest.raises(UserError) as refused:
        chosen(MIB)
    least = int(str(refused.value).split("give fit=")[1].split("MiB")[0]) * MIB
    room = fit.within(least, CPU)
    assert chosen(room).plan.peak <= room
    with pytest.raises(UserError):
        chosen(room - 2 * MIB)


def test_a_micro_batch_is_all_of_a_step_or_the_most_that_fits() -> None:
    everything, few = tokens_chosen(2**40), tokens_chosen(LITTLE)
    # 2 prompts of 6 to 16 tokens, each once, and 16 rollouts of each of 12 tokens at most
    assert 6 + 12 < few < everything and 2 * 6 + 32 * 12 <= everything <= 2 * 16 + 32 * 12
    assert few < tokens_chosen(LITTLE, "model.gradient_checkpointing=full")


@pytest.mark.parametrize("typed", ["0", "much", "-4GB", "9999999PB", "[1GB]"])
def test_what_is_no_size_is_refused(typed: str) -> None:
    with pytest.raises(UserError, match="^fit="):
        settings_of(*RUN, f"fit={typed}")


def test_more_than_there_is_is_refused_and_what_is_free_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "free_bytes", lambda device: 100 * MIB)
    monkeypatch.setattr(fit, "resident_bytes", lambda: 300 * MIB)
    said: list[str] = []

    def room(word: str) -> int:
        return fit.room_of(settings_of(*RUN, f"fit={word}"), CPU, 0, said.append)

    assert room("1GB") == 400 * MIB - fit.BESIDE and "fit=1GB" in said[0] and "400.0 MiB" in said[0]
    assert room("auto") == room("none") == (300 + 90) * MIB and len(said) == 1
    with pytest.raises(UserError, match="fit=1PB.* fit=auto"):
        room("1PB")


def test_control_groups_around_a_process_bound_what_is_free(tmp_path: Path) -> None:
    for group, most in (("a", "5000"), ("a/b", "max"), ("", "100000")):
        folder = tmp_path / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("max", most), ("current", "3000"), ("stat", "anon 2000\ninactive_file 700")):
            (folder / f"memory.{name}").write_text(f"{text}\n")

    def found(path: str) -> list[tuple[int, int]]:
        (tmp_path / "own").write_text(f"7:cpuset:/a\n0::{path}\n")
        return list(memory._control_groups(tmp_path / "own", tmp_path / "cgroup"))

    assert found("/a/b") == [(5000, 2300), (100000, 2300)]
    assert found("/elsewhere/in/a/container") == [(100000, 2300)]
    assert list(memory._control_groups(tmp_path / "none", tmp_path)) == []


@pytest.mark.parametrize("word", ["fit=auto", AUTO])
def test_a_resumed_run_goes_on_with_what_was_chosen(word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    room = LITTLE if word == AUTO else int(0.7 * chosen(2**40).before)
    values = {fit.TOKENS: tokens_chosen(room)} if word == AUTO else chosen(room).values
    monkeypatch.setattr(fit, "process_alone", lambda device: 0)
    monkeypatch.setattr(fit, "room_of", lambda *given: room)
    begun = grpo(*RUN, "train.steps=2", word, "hydra.run.dir=fitted")
    record = json.loads(Path("fitted/run.json").read_text())
    for key, value in values.items():
        group, name = key.split(".")
        assert record["config"][group][name] == value and f"{key}={value} " in begun.stderr
        assert f"{key}={value}" not in record["overrides"]
    monkeypatch.setattr(fit, "chosen", lambda *given: pytest.fail("a resumed run was planned again"))
    grpo("resume=fitted", "train.steps=4", "fit=3GB")
    typed = [f"{key}={str(value).lower()}" for key, value in values.items()]
    sampler = ["sampler=infinite"] if fit.SLOTS in values else []
    grpo(*RUN, "train.steps=4", *sampler, *typed, "hydra.run.dir=whole")
    assert rows(Path("fitted")) == rows(Path("whole"))


def test_a_profile_reports_what_the_fit_of_its_run_would_choose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*RUN, "fit=700MiB", "profile.plan_only=true", "eval.every=0", "hydra.run.dir=out"]
    assert f"{int(0.95 * 700)}.0 MiB" in grpo(*words, command="profile").stderr  # less than 700 - 32
    assert json.loads(Path("out/profile.json").read_text())["fit"]["room_bytes"] == 700 * MIB


def test_what_is_built_without_the_command_line_wants_a_number(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train.micro_batch_tokens=auto"):
        build(replace(settings_of(*RUN, AUTO), run_dir=str(tmp_path)))
