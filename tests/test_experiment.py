"""From settings to objects: what is passed, and what a misspelt or ill-behaved part is told."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import a_correction

from grpo_cli.config.choices import config_dir
from grpo_cli.config.compose import parse
from grpo_cli.config.instantiate import build_rules, make
from grpo_cli.errors import UserError
from grpo_cli.experiment import pick_device, set_up
from grpo_cli.tracking.introduction import introduction

GRPO = {"_target_": "grpo_cli.advantage.grpo", "_partial_": True, "stats_over": "kept"}
LOSS = {
    "_target_": "grpo_cli.loss.grpo",
    "_partial_": True,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "kl_coef": 0.0,
    "aggregation": "sequence",
}
PARTS: dict[str, dict[str, Any]] = {
    "downsample": {"_target_": "grpo_cli.downsample.all_rollouts", "_partial_": True},
    "advantage": GRPO,
    "correction": {"_target_": "grpo_cli.correction.Correct", **asdict(a_correction())},
    "loss": LOSS,
}

RULES_OF_A_USER = """
import torch

class Thing:
    def __init__(self, seed, own):
        self.seed, self.own = seed, own

def first(group, keep, rng):
    return range(keep)

def last(group, keep, rng, *, start):
    return range(start, start + keep)

def too_few(group, keep, rng):
    return [0]

def needs_too_little(group):
    return [0]

def flat(kept_rewards, group_rewards):
    return torch.zeros(3)

def infinite(kept_rewards, group_rewards):
    return kept_rewards / 0

def detached(logprobs, batch, totals):
    from grpo_cli.types import LossOutput
    return LossOutput(logprobs.detach().sum(), {})
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_rules.py").write_text(RULES_OF_A_USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_rules", raising=False)
    return "user_rules"


def rules(n: int = 4, m: int = 2, **changed: dict[str, Any]):
    return build_rules({**PARTS, **changed}, n, m)


def refusal(n: int = 4, m: int = 2, **changed: dict[str, Any]) -> str:
    with pytest.raises(UserError) as refused:
        rules(n, m, **changed)
    return str(refused.value)


def test_a_part_gets_its_own_words_and_the_objects_that_it_names(user_module):
    made = make("task", {"_target_": f"{user_module}.Thing", "own": [1, {"b": 2}]}, {"seed": 3, "unasked": 4})
    assert vars(made) == {"own": [1, {"b": 2}], "seed": 3}


def test_the_yaml_s_word_goes_before_an_object_of_that_name():
    assert make("sampler", {"_target_": "grpo_cli.engine.sampler.Micro", "slots": 5}, {"slots": 3}).slots == 5


def test_the_rules_of_the_package_pass_their_rehearsal():
    made = rules(4, 2, downsample={"_target_": "grpo_cli.downsample.maxvar", "_partial_": True})
    rewards = torch.tensor([0.0, 1.0])
    assert torch.allclose(made.advantage(rewards, rewards), torch.tensor([-0.7070, 0.7070]), atol=1e-4)


def test_a_function_of_one_s_own_is_found_and_called(user_module):
    made = rules(4, 2, downsample={"_target_": f"{user_module}.last", "start": 1, "_partial_": True})
    assert list(made.downsample(None, 2, np.random.default_rng(0))) == [1, 2]


def test_a_function_of_one_s_own_needs_no_partial_in_its_yaml(user_module):
    assert list(rules(4, 2, downsample={"_target_": f"{user_module}.first"}).downsample(None, 2, None)) == [0, 1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"advantage": GRPO | {"stat_over": "kept"}},
            "advantage.stat_over: grpo_cli.advantage.grpo takes no stat_over",
        ),
        ({"advantage": GRPO | {"stat_over": "kept"}}, "did you mean stats_over?"),
        (
            {"advantage": {"_target_": "grpo_cli.advantage.grpo"}},
            "cannot be called as advantage(kept_rewards, group_rewards)",
        ),
        ({"loss": LOSS | {"aggregation": "mean"}}, "loss.aggregation=mean is unknown"),
        ({"downsample": {"_target_": "nowhere.rule"}}, "No module named 'nowhere'"),
        (
            {"downsample": {"_target_": "grpo_cli.downsample.maxvarr"}},
            "downsample._target_=grpo_cli.downsample.maxvarr",
        ),
        ({"downsample": {"_target_": "user_rules.too_few"}}, "returned 1 of them: return exactly 2"),
        (
            {"downsample": {"_target_": "user_rules.needs_too_little"}},
            "cannot be called as downsample(group, keep, rng)",
        ),
        ({"downsample": {"_target_": "user_rules.last"}}, "missing a required"),
        ({"advantage": {"_target_": "user_rules.flat"}}, "asked for a tensor of shape (2,), the answer was shape (3,)"),
        ({"advantage": {"_target_": "user_rules.infinite"}}, "advantage: the answer to a made-up group is not finite"),
        ({"loss": {"_target_": "user_rules.detached"}}, "loss: the answer has no gradient"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_before_the_first_step(user_module, changed, message):
    changed = {"downsample": {"_target_": "grpo_cli.downsample.random", "_partial_": True}, **changed}
    assert message in refusal(4, 2, **changed)


def test_an_engine_s_own_refusals_reach_the_user():
    with pytest.raises(UserError, match="sampler.slots"):
        make("sampler", {"_target_": "grpo_cli.engine.sampler.Micro", "slots": 0}, {})


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="device=cuda was asked for"):
        pick_device("cuda")


def test_an_engine_that_lacks_what_a_run_asks_for_is_refused_before_the_first_step(user_module: str):
    import hydra

    words = [f"engine._target_={user_module}.Thing", "+engine.own=1", "engine.cuda_graph=false", "run_dir=outputs/x"]
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        settings = parse(hydra.compose("train", words))
    del settings.parts["engine"]["cuda_graph"]  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="user_rules.Thing is no engine: it has no reads_stop_strings, generate, stats"):
        set_up(settings, settings.model)


def test_slots_that_no_step_can_fill_are_said_before_the_first_step():
    import hydra

    def said(slots: int) -> list[str]:
        words = ["sampler=infinite", f"sampler.slots={slots}", "n=4", "train.prompts=2", "run_dir=outputs/x"]
        with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
            return list(introduction(parse(hydra.compose("train", words)), 360_000, 360_000, torch.device("cpu")))

    threads = torch.get_num_threads()
    on = f"on cpu ({threads} thread{'s' if threads > 1 else ''})"
    first = f"0.36 M parameters, float32, {on}; a step is 2 prompts x 4 rollouts, all trained on"
    assert said(8) == [first]
    spare = "sampler.slots=9 is more than the 8 rollouts of a step (train.prompts=2 x n=4), so 8 slots are allocated"
    assert said(9) == [first, spare]
