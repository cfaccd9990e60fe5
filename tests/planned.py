"""How much memory a command would take on a GPU, told from models of one layer and of two: it grows by layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import hydra
import torch

from grpo_cli.config.auto import decided
from grpo_cli.config.choices import config_dir
from grpo_cli.config.compose import read_settings
from grpo_cli.config.prepare import prepare
from grpo_cli.model.anatomy import has_dropout
from grpo_cli.profile.estimate import total
from grpo_cli.profile.from_settings import estimator_of, shapes_of, step_of
from grpo_cli.settings import RunSettings

# As long as the problems of GSM8K are on average, in characters; a plan counts a token for each, three times too many.
QUESTION = (
    "A shop sells pens at 2 dollars each and books at 7 dollars each. Ann buys three pens and two books, and gives the "
    "cashier 30 dollars. She shares what is left with her two brothers. How much does each of the three get?"
)


def problems(folder: Path) -> Path:
    file = folder / "problems.jsonl"
    rows = ({"question": f"{QUESTION} ({i})", "answer": "#### 3"} for i in range(400))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def settings_on_a_gpu(*words: str) -> RunSettings:
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        return decided(
            read_settings(hydra.compose("train", [*words, "run_dir=."]), RunSettings), lambda line: None, fast=True
        )


def phases_of(settings: RunSettings) -> dict[str, int]:
    """Bytes of each phase, every rollout as long as may be."""
    device = torch.device("cuda")
    shapes = shapes_of(settings.model, device)
    _, step = step_of(replace(prepare(settings), device=device), has_dropout(shapes.model))
    found = estimator_of(settings, shapes, device, 0).predict(step.at_full_length())
    return {phase: total(sizes) for phase, sizes in found.phases.items()}


def peak_on_a_gpu(*words: str) -> float:
    """Bytes at the fullest moment of a step."""
    layers = dict(settings_on_a_gpu(*words).model.architecture or {})["num_hidden_layers"]
    one, two = (
        phases_of(settings_on_a_gpu(*words, f"model.architecture.num_hidden_layers={count}")) for count in (1, 2)
    )
    return max(size + (layers - 1) * (two[phase] - size) for phase, size in one.items())
