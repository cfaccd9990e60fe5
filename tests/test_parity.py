"""Every logit of our prefill and decode steps is that of one forward of `transformers`, family by family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import VOCABULARY, holds_bits, make_engine, small_model
from tiny_hf import LLAMA3_ROPE

from grpo_cli.collect.requests import seed_of
from grpo_cli.engine.decoder import Decoder
from grpo_cli.settings import Sampling
from grpo_cli.types import Prompt, Request

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}  # within the context the plain one
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    ("llama", {"rope_parameters": DYNAMIC, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {"tie_word_embeddings": False, "head_dim": 16}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": False}),
]


def one_forward(model: Any, prompt: list[int], reply: tuple[int, ...]) -> torch.Tensor:
    """The logits of `transformers` after the prompt and after each token of the reply but the last, with no cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *reply[:-1]]]), use_cache=False).logits
    return logits[0, len(prompt) - 1 :]


@pytest.mark.parametrize(("family", "config"), CASES, ids=str)
def test_every_step_has_the_logits_of_transformers(
    family: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    expected = one_forward(model, prompt, rollout.token_ids)
    torch.testing.assert_close(torch.stack(made[: len(expected)]), expected, atol=3e-5, rtol=1e-5)
