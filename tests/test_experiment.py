"""From settings to objects: what is passed, and what a misspelt or ill-behaved part is answered."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made
import pytest
import torch

from grpo_cli.config.instantiate import make
from grpo_cli.config.prepare import check, pick_device
from grpo_cli.support.errors import UserError

RULES_OF_A_USER = """
import torch
from grpo_cli.types import LossOutput

class Thing:
    def __init__(self, seed, own):
        self.seed, self.own = seed, own

def last(group, keep, rng, *, start):
    return range(start, start + keep)

def too_few(group, keep, rng):
    return [0]

def crash(group, keep, rng):
    return [][1]

def infinite(group, kept):
    return torch.ones(len(kept)) / 0

def detached(logprobs, batch, totals):
    return LossOutput(logprobs.detach().sum(), {})

def compared(logprobs, batch, totals):
    return LossOutput((logprobs - batch.ref_logprobs).square().sum(), {})

def marked(logprobs, batch, totals):
    return compared(logprobs, batch, totals)

marked.needs_reference = True

class NoNext:
    needs_lengths = False

    def start(self, waiting, slots): ...
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_rules.py").write_text(RULES_OF_A_USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_rules", raising=False)
    return "user_rules"


def test_a_part_gets_its_own_words_and_the_objects_that_it_names(user_module):
    thing = make("sparsity", {"_target_": f"{user_module}.Thing", "own": [1, {"b": 2}]}, {"seed": 3, "unasked": 4})
    assert vars(thing) == {"own": [1, {"b": 2}], "seed": 3}


@pytest.mark.parametrize(
    ("changed", "key", "way_out"),
    [
        ({"advantage": made.part("advantage", "grpo", stat_over="kept")}, "advantage.stat_over", "mean stats_over?"),
        ({"loss": made.part("loss", "grpo", aggregation="mean")}, "loss.aggregation=mean", "one of sequence"),
        ({"downsample": {"_target_": "nowhere.rule"}}, "downsample._target_=nowhere.rule", "module.name"),
        ({"downsample": {"_target_": "user_rules.too_few"}}, "user_rules.too_few", "return 2 different"),
        ({"downsample": {"_target_": "user_rules.infinite"}}, "downsample._target_", "(group, keep, rng)"),
        ({"downsample": {"_target_": "user_rules.last"}}, "downsample._target_", "+downsample.<argument>=..."),
        ({"downsample": {"_target_": "user_rules.crash"}}, "user_rules.crash", "line "),
        ({"advantage": {"_target_": "user_rules.infinite"}}, "advantage user_rules.infinite", "NaN or infinity"),
        ({"loss": {"_target_": "user_rules.detached"}}, "loss user_rules.detached", "with a gradient"),
        ({"loss": {"_target_": "user_rules.compared"}}, "loss user_rules.compared", "TypeError"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_before_a_run_or_a_sweep_begins(user_module, changed, key, way_out):
    with pytest.raises(UserError) as refused:
        checked(2, **{"downsample": made.part("downsample", "random"), **changed})
    assert key in str(refused.value) and way_out in str(refused.value)


def checked(m: int = 16, **changed: dict[str, Any]) -> None:
    check(replace(made.settings(), m=m, parts={**made.settings().parts, **changed}))


def test_a_part_that_lacks_members_is_refused_and_a_loss_that_says_so_gets_its_reference(user_module):
    with pytest.raises(UserError, match="scheduler: user_rules.NoNext lacks next"):
        checked(scheduler={"_target_": f"{user_module}.NoNext"})
    checked(loss={"_target_": f"{user_module}.marked"})


def test_cuda_without_a_gpu_is_refused_with_the_reason(monkeypatch):
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nand more")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match=r"device=cuda: PyTorch finds no GPU: .*too old \(found"):
        pick_device("cuda")


def test_jobs_that_share_a_gpu_leave_room_for_what_cuda_takes_of_each(monkeypatch):
    shares: list[Any] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=24 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    pick_device("cuda")
    monkeypatch.setenv("GRPO_GPU_SHARE", "0.25")
    pick_device("cuda")
    assert shares == [1.0, 0.25 - 0.5 / 24]
