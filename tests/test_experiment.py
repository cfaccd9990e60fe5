"""From settings to objects: what is passed, and what a misspelt or ill-behaved part is answered."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made
import numpy as np
import pytest
import torch
from bank import Scripted
from small import advantages_of

from grpo_cli.config.choices import read_command
from grpo_cli.config.compose import settings_of
from grpo_cli.config.instantiate import PROTOCOLS, Factories, make
from grpo_cli.config.prepare import check, pick_device, prepare
from grpo_cli.config.trial import try_rules
from grpo_cli.experiment import set_up
from grpo_cli.interfaces import Runtime
from grpo_cli.support.errors import UserError
from grpo_cli.tracking.introduction import introduction

GRPO, LOSS = made.part("advantage", "grpo"), made.part("loss", "grpo")
PARTS = {
    group: made.part(group, choice) for group, choice in read_command("train").choices.items() if group in PROTOCOLS
} | {"downsample": made.part("downsample", "all")}

RULES_OF_A_USER = """
import torch
from grpo_cli.types import LossOutput

def output(loss):
    return LossOutput(loss, {})

class Thing:
    def __init__(self, seed, own):
        self.seed, self.own = seed, own

def last(group, keep, rng, *, start):
    return range(start, start + keep)

def too_few(group, keep, rng):
    return [0]

def needs_too_little(group):
    return [0]

def plain(logprobs, batch, totals):
    return output(logprobs.sum())

def flat(group, kept):
    return torch.zeros(3)

def infinite(group, kept):
    return torch.ones(len(kept)) / 0

def detached(logprobs, batch, totals):
    return output(logprobs.detach().sum())

def compared(logprobs, batch, totals, *, beta):
    return output(beta * (logprobs - batch.ref_logprobs).square().sum())

def marked(logprobs, batch, totals, *, beta):
    return compared(logprobs, batch, totals, beta=beta)

marked.needs_reference = True

class Marked:
    needs_reference = True

    def __init__(self, beta):
        self.beta = beta

    def __call__(self, logprobs, batch, totals):
        return compared(logprobs, batch, totals, beta=self.beta)

def broken(logprobs, batch, totals):
    return logprobs + None

def crash(group, keep, rng):
    return [][1]

class NoNext:
    needs_lengths = False

    def start(self, waiting, slots): ...



class NeedsModel:
    prefix_tokens = 0

    def __init__(self, model): ...
    def predict(self, requests, hidden): ...
    def learn(self, finished, hidden): ...
    def state(self): ...
    def load_state(self, state): ...
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_rules.py").write_text(RULES_OF_A_USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_rules", raising=False)
    return "user_rules"


def rules(n: int = 4, m: int = 2, **changed: dict[str, Any]):
    settings = settings_of(f"n={n}", f"m={m}", "train.prompts=2", "collector=equal")
    made_rules = Factories.of({**settings.parts, **PARTS, **changed}).rules()
    try_rules(made_rules, n, m, settings.train.prompts)
    return made_rules


def test_a_part_gets_its_own_words_and_the_objects_that_it_names(user_module):
    thing = make("sparsity", {"_target_": f"{user_module}.Thing", "own": [1, {"b": 2}]}, {"seed": 3, "unasked": 4})
    assert vars(thing) == {"own": [1, {"b": 2}], "seed": 3}
    found = rules(4, 2, downsample={"_target_": f"{user_module}.last", "start": 1})
    assert list(found.downsample(None, 2, np.random.default_rng(0))) == [1, 2]
    assert advantages_of(found.advantage, [0.0, 1.0]) == pytest.approx([-0.7070, 0.7070], abs=1e-4)


@pytest.mark.parametrize(
    ("changed", "key", "way_out"),
    [
        ({"advantage": GRPO | {"stat_over": "kept"}}, "advantage.stat_over", "did you mean stats_over?"),
        (
            {"advantage": {"_target_": "grpo_cli.rules.advantage.grpo"}},
            "advantage._target_=grpo_cli.rules.advantage.grpo",
            "+advantage.<argument>=...",
        ),
        ({"loss": LOSS | {"aggregation": "mean"}}, "loss.aggregation=mean", "one of sequence"),
        ({"downsample": {"_target_": "nowhere.rule"}}, "downsample._target_=nowhere.rule", "module.name"),
        ({"downsample": {"_target_": "grpo_cli.rules.downsample.maxvarr"}}, "downsample.maxvarr", "module.name"),
        ({"downsample": {"_target_": "user_rules.too_few"}}, "user_rules.too_few", "return 2 different"),
        ({"downsample": {"_target_": "user_rules.needs_too_little"}}, "downsample._target_", "(group, keep, rng)"),
        ({"downsample": {"_target_": "user_rules.last"}}, "downsample._target_", "+downsample.<argument>=..."),
        ({"downsample": {"_target_": "user_rules.crash"}}, "user_rules.crash", "line "),
        ({"advantage": {"_target_": "user_rules.flat"}}, "advantage user_rules.flat", "a tensor of shape (2,)"),
        ({"advantage": {"_target_": "user_rules.infinite"}}, "advantage user_rules.infinite", "NaN or infinity"),
        ({"loss": {"_target_": "user_rules.detached"}}, "loss user_rules.detached", "with a gradient"),
        ({"loss": {"_target_": "user_rules.broken"}}, "loss user_rules.broken", "line "),
        ({"loss": {"_target_": "user_rules.compared", "beta": 0.1}}, "loss user_rules.compared", "TypeError"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_before_a_run_or_a_sweep_begins(user_module, changed, key, way_out):
    with pytest.raises(UserError) as refused:
        checked(2, **{"downsample": made.part("downsample", "random"), **changed})
    assert key in str(refused.value) and way_out in str(refused.value)


@pytest.mark.parametrize("name", ["marked", "Marked"])
def test_a_loss_that_says_so_gets_its_reference_whatever_its_words(user_module, name):
    assert rules(4, 4, loss={"_target_": f"{user_module}.{name}", "beta": 0.1}).loss.needs_reference
    assert not rules(4, 4, loss={"_target_": f"{user_module}.plain"}).loss.needs_reference


def checked(m: int = 16, **changed: dict[str, Any]) -> None:
    check(replace(made.settings(), m=m, parts={**made.settings().parts, **changed}))


def test_a_part_that_lacks_members_is_refused_unless_it_waits_for_the_model(user_module):
    with pytest.raises(UserError, match="scheduler: user_rules.NoNext lacks next"):
        checked(scheduler={"_target_": f"{user_module}.NoNext"})
    checked(predictor={"_target_": f"{user_module}.NeedsModel"})
    settings = settings_of(f"engine._target_={user_module}.Thing", "+engine.own=1", "run_dir=outputs/x")
    with pytest.raises(UserError, match="engine: user_rules.Thing lacks reads_stop_strings, generate, stats"):
        set_up(prepare(settings), settings.model)


def test_cuda_without_a_gpu_is_refused_with_the_reason(monkeypatch):
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nand more")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match=r"device=cuda was asked for, but PyTorch finds no GPU here .*too old \(found"):
        pick_device("cuda")
    settings = settings_of("run_dir=outputs/x")
    runtime = Runtime(torch.device("cpu"), torch.nn.Linear(1, 1), None, 0, Scripted(), Scripted())
    assert any("device=auto is cpu" in line for line in introduction(settings, runtime))


def test_jobs_that_share_a_gpu_leave_room_for_what_cuda_takes_of_each(monkeypatch):
    shares: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=24 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    pick_device("cuda")
    monkeypatch.setenv("GRPO_GPU_SHARE", "0.25")
    pick_device("cuda")
    assert shares == [1.0, 0.25 - 0.5 / 24]
