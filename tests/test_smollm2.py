"""A real pretrained model, SmolLM2-135M-Instruct (scripts/get_smollm2.sh): our engine says what transformers says.

The folder is models/smollm2, or where $SMOLLM2 says.
"""

from __future__ import annotations

import pytest
import torch
from conftest import SMOLLM2
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli.collect.requests import requests_for
from grpo_cli.config.compose import settings_of
from grpo_cli.config.prepare import prepare
from grpo_cli.experiment import set_up
from grpo_cli.settings import Sampling
from grpo_cli.types import Prompt

pytestmark = pytest.mark.smollm2
QUESTIONS = ("What is the capital of France?", "Tom has 3 apples and buys 4 more. How many has he?", "Say hello.")


def test_greedy_rollouts_are_those_of_transformers() -> None:
    settings = settings_of(
        "model=smollm2_135m", f"model.path={SMOLLM2}", "sampler=infinite", "sampler.slots=2", "device=cpu"
    )
    runtime = set_up(prepare(settings), settings.model)
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True) for q in QUESTIONS
    ]
    ids = [chat["input_ids"] for chat in chats]
    prompts = [Prompt(str(i), tuple(row), "") for i, row in enumerate(ids)]
    requests = requests_for(prompts, 1, Sampling.plain(24, temperature=0.0), 0, 0)
    ours = {rollout.request.prompt.id: list(rollout.token_ids) for rollout in runtime.engine.generate(requests)}
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in settings.model.eos_tokens]
    for i, row in enumerate(ids):
        said = model.generate(torch.tensor([row]), max_new_tokens=24, do_sample=False, eos_token_id=ends)
        assert ours[str(i)] == said[0, len(row) :].tolist()
    assert "Paris" in tokenizer.decode(ours["0"])
