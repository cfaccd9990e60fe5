"""Plans for a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import hydra
import torch

from grpo_cli.config.auto import decided
from grpo_cli.config.choices import config_dir
from grpo_cli.config.compose import read_settings
from grpo_cli.config.prepare import prepare
from grpo_cli.memory.planner import Planner
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


def peak_on_a_gpu(*words: str) -> float:
    """Bytes at the fullest moment of a step, every rollout as long as may be."""
    return Planner.of(prepare(settings_on_a_gpu(*words)), torch.device("cuda")).plan().peak
