"""The rollout engine: a rollout is a function of its request, whatever else happens, and the memory is what is said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from made import full, infinite, micro
from orders import AnyOrder, Forgetful
from small import make_engine, small_model, some_requests
from tiny_hf import FAMILIES, LLAMA3_ROPE

from grpo_cli.engine.scheduling import Fifo, Lpt
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Prompt, Request, Rollout


def dense_logprobs(model: Any, rollout: Rollout) -> torch.Tensor:
    """What plain `transformers` says of a rollout's tokens, without a cache and at temperature 1."""
    start = len(rollout.request.prompt.token_ids)
    ids = torch.tensor([[*rollout.request.prompt.token_ids, *rollout.token_ids]])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, start - 1 : -1]
    return logprobs.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("family", "config"),
    [
        *((family, {"num_key_value_heads": heads}) for family, heads in zip(FAMILIES, (1, 2, 4, 2), strict=True)),
        ("llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"head_dim": 16, "attention_bias": True}),
        ("mistral", {"head_dim": 16, "tie_word_embeddings": False}),
    ],
)
def test_with_a_dense_cache_the_sampler_is_the_policy(family: str, config: dict[str, Any]) -> None:
    model = small_model(family, **config)
    for rollout in make_engine(model).generate(some_requests(prompts=2, n=3)):
        torch.testing.assert_close(
            torch.tensor(rollout.sampler_logprobs), dense_logprobs(model, rollout), atol=2e-5, rtol=0
        )


class Witness(Forgetful):
    """Remembers the hidden state that it was shown for each request."""

    def predict(self, requests: Sequence[Request], hidden: torch.Tensor | None) -> Sequence[float] | None:
        assert hidden is not None
        self.seen = dict(zip(requests, hidden, strict=True))
        return super().predict(requests, hidden)

    def learn(self, finished: Sequence[Rollout], hidden: torch.Tensor | None) -> None:
        assert hidden is not None
        self.learnt = dict(zip(finished, hidden, strict=True))


def test_a_predictor_sees_the_state_after_each_request_s_own_prefix_and_learns_from_the_same() -> None:
    model, witness = small_model(), Witness()
    engine = make_engine(model, sampler=infinite(slots=3), scheduler=Lpt(), predictor=witness)
    rollouts = list(engine.generate(some_requests(prompts=3, n=4)))
    longer = [rollout for rollout in rollouts if len(rollout) > 3]
    assert set(witness.learnt) == set(longer) and len(witness.seen) == len(longer) < len(rollouts)
    for rollout in longer:
        ids = torch.tensor([[*rollout.request.prompt.token_ids, *rollout.token_ids[:2]]])
        with torch.no_grad():
            state = model.model(ids).last_hidden_state[0, -1]
        torch.testing.assert_close(witness.seen[rollout.request], state, atol=2e-5, rtol=0)
        assert torch.equal(witness.learnt[rollout], witness.seen[rollout.request])


def test_each_prompt_is_computed_once_and_decode_steps_are_the_schedule_s() -> None:
    model, requests = small_model(), some_requests(prompts=3, n=4)
    prompt_tokens = sum(len(r.prompt.token_ids) for r in requests[::4])
    engine = make_engine(model, sampler=infinite(slots=2), scheduler=AnyOrder())
    list(engine.generate(requests))
    assert engine.stats().prefill_tokens == prompt_tokens, "also where more prompts are open than there are slots"
    for sampler in (full(), micro(slots=4), infinite(slots=4)):
        engine = make_engine(model, sampler=sampler)
        steps = [len(r) - 1 for r in sorted(engine.generate(requests), key=lambda r: requests.index(r.request))]
        stats = engine.stats()
        assert stats.prefill_tokens == prompt_tokens
        assert stats.generated_tokens == sum(steps) + len(steps)
        if sampler.all_at_once:
            assert stats.decode_steps == max(steps)
        elif not sampler.refills:
            assert stats.decode_steps == sum(max(steps[i : i + 4]) for i in range(0, 12, 4))
        else:
            assert max(max(steps), -(-sum(steps) // 4)) <= stats.decode_steps
        assert stats.slot_utilisation == pytest.approx(sum(steps) / (stats.decode_steps * stats.slots))


def test_a_scheduler_returns_waiting_sequences_once_each() -> None:
    class Again(Fifo):
        def next(self, running: Sequence[Any]) -> Any:
            return self._queue[0]

    with pytest.raises(AssertionError, match="waiting sequences, once"):
        list(make_engine(small_model(), scheduler=Again()).generate(some_requests()))


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    request = Request(Prompt("long", (3,) * 250, ""), 0, 0, Sampling.plain(7))
    with pytest.raises(UserError, match="sampling.max_new_tokens=7, together 257"):
        list(make_engine(small_model()).generate([request]))
