"""Every logit of our prefill and decode steps is that of one forward of `transformers`, family by family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import SMOLLM2
from small import VOCABULARY, holds_bits, make_engine, small_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli.collect.requests import requests_for, seed_of
from grpo_cli.config.compose import settings_of
from grpo_cli.config.prepare import prepare
from grpo_cli.engine.decoder import Decoder
from grpo_cli.experiment import set_up
from grpo_cli.settings import Sampling
from grpo_cli.types import Prompt, Request

# Llama 3's scaling, at a length that small models pass.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}  # within the context the plain one
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    ("llama", {"rope_parameters": DYNAMIC, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {"tie_word_embeddings": False, "head_dim": 16}),
    ("qwen2", {}),
    ("qwen2", {"num_key_value_heads": 4}),
    ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("family", "config"), CASES, ids=str)
def test_every_step_has_the_logits_of_transformers(family, config, monkeypatch):
    model = small_model(family, **config)
    holds_bits(model)  # tried with the real head, before it is watched
    made: list[torch.Tensor] = []
    compute = Decoder.logits

    def noted(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        made.append(compute(self, hidden)[0].clone())
        return made[-1][None]

    monkeypatch.setattr(Decoder, "logits", noted)
    prompt = torch.randint(2, VOCABULARY, (37,), generator=torch.Generator().manual_seed(0)).tolist()
    request = Request(Prompt("p", tuple(prompt), ""), 0, seed_of(0), Sampling.plain(40))
    (rollout,) = make_engine(model, eos_token_ids=()).generate([request])  # no end: all forty steps are made
    assert len(rollout) == 40
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *rollout.token_ids[:-1]]]), use_cache=False).logits
    expected = logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(torch.stack(made[: len(expected)]), expected, atol=3e-5, rtol=1e-5)


# A real pretrained model


QUESTIONS = ("What is the capital of France?", "Tom has 3 apples and buys 4 more. How many has he?", "Say hello.")


@pytest.mark.smollm2
def test_greedy_rollouts_are_those_of_transformers():
    words = ("model=smollm2_135m", f"model.path={SMOLLM2}", "sampler=infinite", "sampler.slots=2", "device=cpu")
    settings = settings_of(*words)
    runtime = set_up(prepare(settings), settings.model)
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    chats = ([{"role": "user", "content": question}] for question in QUESTIONS)
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    prompts = [Prompt(str(i), tuple(row), "") for i, row in enumerate(ids)]
    requests = requests_for(prompts, 1, Sampling.plain(24, temperature=0.0), 0, 0)
    ours = {rollout.request.prompt.id: list(rollout.token_ids) for rollout in runtime.engine.generate(requests)}
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in settings.model.eos_tokens]
    for i, row in enumerate(ids):
        said = model.generate(torch.tensor([row]), max_new_tokens=24, do_sample=False, eos_token_id=ends)
        assert ours[str(i)] == said[0, len(row) :].tolist()
    assert "Paris" in tokenizer.decode(ours["0"])
