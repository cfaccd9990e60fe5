"""Every part of the torch path once, each by itself: two steps of `grpo train`, small on a CPU and whole on a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from grpo_cli import experiment
from grpo_cli.config.compose import settings_of
from grpo_cli.runs.layout import METRICS

BASE = ("train.steps=2", "train.prompts=4", "n=8", "m=8", "eval.every=0", "sampling.max_new_tokens=24", "logger=jsonl")
TRIED = yaml.safe_load((Path(__file__).parent / "contact.yaml").read_text(encoding="utf-8"))
# Log ratios of sampler and policy: by how much a mean may be off, and how far the smallest thousandth may lie.
CLOSE, FAR = {"float32": 1e-3, "bfloat16": 0.02, "autocast": 0.02}, {"float32": 0.01, "bfloat16": 0.5, "autocast": 0.5}
CASES = {
    f"{family}, {precision}": (precision, (*words, *more))
    for family, words in TRIED["families"].items()
    for precision, more in TRIED["precisions"].items()
} | {way: ("float32", (*words, *TRIED["precisions"]["float32"])) for way, words in TRIED["ways"].items()}
ON_CPU = ("embedded, autocast", "rkv, prompts too", "adapters, checkpointing")  # other tests prove the parts there


@pytest.mark.parametrize(
    ("device", "case"),
    [
        *(pytest.param("cpu", case, marks=pytest.mark.study) for case in ON_CPU),
        *(pytest.param("cuda", case, marks=pytest.mark.gpu) for case in CASES),
    ],
)
def test_rollouts_are_drawn_from_the_policy_and_every_metric_is_finite(device: str, case: str, tmp_path: Path) -> None:
    precision, words = CASES[case]
    experiment.build(settings_of(*BASE, *words, f"device={device}", f"run_dir={tmp_path}")).fit()
    rows = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    last = [row for row in rows if "mismatch/kl" in row][-1]  # a step without a gradient has none
    if "correction=sparse_rl" not in words:
        assert abs(last["mismatch/ratio_mean"] - 1) < CLOSE[precision]
        assert last["mismatch/log_ratio_q001"] > -FAR[precision]
