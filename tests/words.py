"""Tasks as their YAML files describe them, and real data where it lies beside the project."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from grpo_cli.config.choices import config_dir
from grpo_cli.settings import Sampling
from grpo_cli.tasks.jsonl import Jsonl
from grpo_cli.types import Finish, Prompt, Request, Rollout

# A folder `data` of a folder `shared` beside the checkout, or where the variable says.
DATA = Path(os.environ.get("GRPO_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
GSM8K = DATA / "gsm8k"


def unexpected(text: str) -> None:
    raise AssertionError(f"a warning that nobody expected: {text}")


def task_of(name: str, tokenizer: Any, **settings: Any) -> Jsonl:
    """The task `name`, with all that its YAML says and `settings` on top."""
    words = yaml.safe_load((config_dir() / "task" / f"{name}.yaml").read_text("utf-8"))
    del words["_target_"]
    return Jsonl(tokenizer, 0, **({"warn": unexpected} | words | settings))


def rollout_of(prompt: Prompt, reply: str, tokenizer: Any, sample: int = 0) -> Rollout:
    """A rollout that says `reply` and ends by itself."""
    token_ids = (*tokenizer(reply)["input_ids"], tokenizer.eos_token_id)
    return Rollout(Request(prompt, sample, 0, Sampling()), token_ids, (0.0,) * len(token_ids), Finish.EOS, 0)
