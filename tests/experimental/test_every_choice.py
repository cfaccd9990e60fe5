"""Every experimental choice takes two steps, or answers an evaluation; and the core knows none of them."""

from __future__ import annotations

import math
import re

import pytest
from made import composed
from test_architecture import FILES, own_imports
from typed import json_lines

from grpo_cli.cli.explain import explain
from grpo_cli.config.choices import EXPERIMENTAL
from grpo_cli.config.compose import settings_of
from grpo_cli.config.prepare import prepare
from grpo_cli.experiment import build, evaluate_model
from grpo_cli.runs.layout import METRICS
from grpo_cli.support.errors import UserError

CHOICES = sorted(f"{file.parent.name}={file.stem}" for file in EXPERIMENTAL.glob("*/[!_]*.yaml"))
SMALL = "train.steps=2 train.prompts=4 task.train_problems=16 n=4 m=4 eval.every=0 eval.problems=2".split()
SMALL += ["sampling.max_new_tokens=24"]
ARROL = "collector=arrol collector.min_rollouts=4 collector.warmup=0"
WITH = {
    "advantage=beta": "collector=aero downsample=aero",
    "advantage=probe": f"advantage.min_rollouts=4 {ARROL}",
    "collector=arrol": ARROL,
    "collector=dars": "advantage=dr_grpo collector.divided=false",
    "collector=hint": "correction=mis train.minibatches=2",
    "collector=lookahead": "collector.tau_abs=0.01 collector.tau_rel=0.99 collector.chunk=2",
    "advantage=median": "n=5",
    "curriculum=dps": "task.train_problems=4",
    "advantage=arms": "collector=hint",
    "advantage=fresh": "collector=partial",
    "collector=fifo": "correction=decoupled task.train_problems=8",
    "downsample=aero": "advantage=beta m=2",
    "downsample=median": "advantage=median n=5",
    "downsample=shortest": "m=2",
    "loss=echo": "train.minibatches=2",
    "loss=mu_grpo": "train.minibatches=2",
}
RECORDED = {"collector=folder": "collector.path=RUN", "predictor=oracle": "predictor.lengths=RUN/rollouts.jsonl"}


@pytest.mark.parametrize("choice", [one for one in CHOICES if not one.startswith("search=") and "a2po" not in one])
def test_a_choice_takes_two_steps(choice, tmp_path):
    before, tmp_path = tmp_path / "before", tmp_path / "run"
    recorded = RECORDED.get(choice, "").replace("RUN", str(before))
    if recorded:
        words = "record.rollouts=-1", "record.tokens=true", f"run_dir={before}", "logger=jsonl", "device=cpu"
        build(settings_of(*SMALL, *words)).fit()
    words = f"{choice} {recorded} {WITH.get(choice, '')} device=cpu logger=jsonl run_dir={tmp_path}".split()
    assert build(settings_of(*SMALL, *words)).fit()["step"] == 2
    rows = json_lines(tmp_path / METRICS)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    for name in {*rows[-1]} - {"step"}:
        explain(name)  # UserError for a metric without a sentence


@pytest.mark.parametrize("choice", [one for one in CHOICES if one.startswith("search=")])
def test_a_search_answers_every_problem(choice, tmp_path):
    small = ["eval.problems=3", "eval.k=1", "sampling.max_new_tokens=16", "device=cpu", "logger=jsonl"]
    result = evaluate_model(prepare(composed(choice, *small, f"run_dir={tmp_path}", command="eval")))
    assert [one.reason for one in result.examples] == ["greedy"] * 3 + ["sampled"] * 3 + ["searched"] * 3
    assert 0 < result.metrics["search/sequential"] < result.metrics["search/tokens"]


def test_answers_from_before_training_are_what_a2po_learns_by(tmp_path):
    small = ["task.train_problems=8", "sampling.max_new_tokens=16", "device=cpu", "logger=jsonl"]
    asked = ["eval.split=train", "eval.problems=-1", "eval.k=2", *small, f"run_dir={tmp_path / 'before'}"]
    (tmp_path / "before").mkdir()
    evaluate_model(prepare(composed(*asked, command="eval")))
    words = ["advantage=a2po", "loss=a2po", f"advantage.answers={tmp_path / 'before' / 'samples.jsonl'}", *small]
    assert build(settings_of(*SMALL, *words, f"run_dir={tmp_path / 'run'}")).fit()["step"] == 2
    with pytest.raises(UserError, match="no answer to this run's"):
        build(settings_of(*SMALL, *words, "seed=1", f"run_dir={tmp_path / 'other'}"))


def test_the_core_neither_imports_what_is_experimental_nor_names_its_choices():
    core = {module: file for module, file in FILES.items() if not module.startswith("experimental/")}
    typed = re.compile(rf"\b({'|'.join(CHOICES)})\b")
    for module, file in core.items():
        assert "experimental" not in str(own_imports(module)), module
        assert typed.findall(file.read_text("utf-8")) == [], module
