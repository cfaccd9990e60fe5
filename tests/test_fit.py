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
from grpo_cli.config.prepare import Prepared, prepare
from grpo_cli.model.anatomy import has_dropout
from grpo_cli.profile import fit
from grpo_cli.profile.estimate import OPTIMIZER, OTHER, REFERENCE, WEIGHTS, Estimator
from grpo_cli.profile.fit import Fitted
from grpo_cli.profile.from_settings import shapes_of, step_of
from grpo_cli.profile.shapes import ShapeModel
from grpo_cli.support.errors import UserError

RUN = (*WORDS, "n=16")
CPU = torch.device("cpu")
MIB = 2**20


@cache
def prepared() -> tuple[Prepared[Any], ShapeModel]:
    """With the shapes, which remember what they were asked: most of the time of a plan."""
    run = prepare(settings_of(*RUN, "fit=auto"))
    return run, shapes_of(run.settings.model, CPU)


def plan(room: int, typed: frozenset[str] = frozenset()) -> fit.Fitted:
    run, shapes = prepared()
    return fit.planned(run, CPU, room, typed, 0, shapes)


def grpo(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, ["train", *words], prog_name="grpo")
    assert result.exit_code == code, result.output
    return result


@pytest.mark.matrix
def test_nothing_is_chosen_where_there_is_room_and_less_room_is_never_given_more() -> None:
    whole = plan(2**40)
    assert whole.choices == () and whole.peak == whole.before
    peaks = [whole.peak]
    for share in (0.9, 0.7, 0.5):
        room = int(share * whole.peak)
        found = plan(room)
        assert found.choices and found.peak <= room and found.before == pytest.approx(whole.peak, rel=1e-3)
        peaks.append(found.peak)
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.matrix
def test_what_is_typed_is_not_chosen_even_if_nothing_fits_so() -> None:
    whole = plan(2**40)
    room = int(0.7 * whole.peak)
    (key, *_) = plan(room).values
    with_it_typed = plan(room, typed=frozenset({key}))
    assert key not in with_it_typed.values and with_it_typed.peak <= room
    everything = frozenset({fit.TOKENS, fit.CHUNK, fit.RECOMPUTE, fit.SLOTS})
    with pytest.raises(UserError) as refused:
        plan(room, typed=everything)
    assert fit.TOKENS in str(refused.value) and "leave them out" in str(refused.value)


def test_a_refusal_says_the_least_that_would_do_and_that_does() -> None:
    with pytest.raises(UserError) as refused:
        plan(MIB)
    least = int(str(refused.value).split("give fit=")[1].split("MiB")[0]) * MIB
    room = min(int(fit.MARGIN * least), least - fit.BESIDE)
    assert plan(room).peak <= room
    with pytest.raises(UserError):
        plan(room - 2 * MIB)


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
    assert fit.room_of(replace(settings_of(*RUN), fit="auto"), CPU, 0, said.append) == int(fit.SHARE * 400 * MIB)


def test_a_resumed_run_goes_on_with_what_was_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fit, "process_alone", lambda device: 0)
    monkeypatch.setattr(fit, "room_of", lambda *given: int(0.7 * whole.peak))
    whole = plan(2**40)
    chosen = plan(int(0.7 * whole.peak)).values
    begun = grpo(*RUN, "train.steps=2", "fit=auto", "hydra.run.dir=fitted")
    record = json.loads(Path("fitted/run.json").read_text())
    for key, value in chosen.items():
        group, name = key.split(".")
        assert record["config"][group][name] == value and f"{key}={value}".lower() in begun.stderr.lower()
        assert not any(word.startswith(key) for word in record["overrides"])
    monkeypatch.setattr(fit, "planned", lambda *given: pytest.fail("a resumed run was planned again"))
    again = grpo("resume=fitted", "train.steps=4", "fit=3GB").stderr
    assert "fit=3GB chooses nothing for a resumed run" in again and all(key in again for key in chosen)
    assert not list(Path("fitted").glob("resumed_*.json")) or "micro_batch" not in begun.stdout
    typed = [f"{key}={str(value).lower()}" for key, value in chosen.items()]
    sampler = ["sampler=infinite"] if fit.SLOTS in chosen else []
    grpo(*RUN, "train.steps=4", *sampler, *typed, "hydra.run.dir=whole")
    assert rows(Path("fitted")) == rows(Path("whole"))


def test_a_profile_says_what_the_fit_of_its_run_would_choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    room: list[int] = []
    planned = Fitted((), peak=1, before=1, phase="decode")
    monkeypatch.setattr(fit, "planned", lambda run, device, given, *more: room.append(given) or planned)
    words = [*RUN, "fit=700MiB", "profile.plan_only=true", "eval.every=0", "hydra.run.dir=out"]
    result = CliRunner().invoke(cli.app, ["profile", *words], prog_name="grpo")
    assert result.exit_code == 0 and "fit=700MiB: at most" in result.stderr
    assert room == [int(0.95 * 700 * MIB)]  # less than 700 - 32
    assert json.loads(Path("out/profile.json").read_text())["fit"]["room_bytes"] == 700 * MIB


@pytest.mark.matrix
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu_all_that_is_chosen_is_needed(graphs: bool) -> None:
    """Slots that are replayed stay through updates."""
    run, shapes = prepared()
    parts = {**run.settings.parts, "engine": {**run.settings.parts["engine"], "cuda_graph": graphs}}
    run, gpu = replace(run, settings=replace(run.settings, parts=parts)), torch.device("cuda")
    whole = fit.planned(run, gpu, 2**40, frozenset(), 0, shapes)
    assert whole.choices == ()
    for share in (0.9, 0.5, 0.3):
        room = int(share * whole.peak)
        found = fit.planned(run, gpu, room, frozenset(), 0, shapes)
        assert found.choices and found.peak <= room
        for key in found.values:
            assert fit._Asks(run, gpu, 0, shapes).prediction(_without(found.values, key)).peak > room


def _without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def test_on_a_cpu_a_part_of_what_comes_and_goes_is_held_besides_and_at_most_so_much() -> None:
    _, shapes = prepared()
    _, step = step_of(prepared()[0], has_dropout(shapes.model))
    bare, held = (Estimator(shapes, 5, 7, on_cpu=on_cpu).predict(step).phases for on_cpu in (False, True))
    for phase, sizes in bare.items():
        passing = sum(size for kind, size in held[phase].items() if kind not in (WEIGHTS, REFERENCE, OPTIMIZER, OTHER))
        assert sizes[OTHER] == 7 and held[phase][OTHER] == 7 + min(160 * MIB, int(0.8 * passing))
