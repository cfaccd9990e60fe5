"""Tasks as their YAML files describe them."""

from __future__ import annotations

from typing import Any

import made
from made import unexpected

from grpo_cli.settings import Sampling
from grpo_cli.tasks.jsonl import Jsonl
from grpo_cli.types import Finish, Prompt, Request, Rollout


def task_of(name: str, tokenizer: Any, **settings: Any) -> Jsonl:
    """The task `name`, with all that its YAML says and `settings` on top."""
    offered = {"tokenizer": tokenizer, "seed": 0, "warn": settings.pop("warn", unexpected)}
    offered["max_prompt_tokens"] = settings.pop("max_prompt_tokens", None)
    return made.ready("task", name, offered, **settings)


def rollout_of(prompt: Prompt, reply: str, tokenizer: Any, sample: int = 0) -> Rollout:
    """A rollout that says `reply` and ends by itself."""
    token_ids = (*tokenizer(reply)["input_ids"], tokenizer.eos_token_id)
    return Rollout(Request(prompt, sample, 0, Sampling.plain(128)), token_ids, (0.0,) * len(token_ids), Finish.EOS)
