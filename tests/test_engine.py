"""The rollout engine: a rollout is a function of its request, whatever else happens, and the memory is what is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made import full, infinite, micro, prefix_head
from orders import AnyOrder, Forgetful
from small import Again, contents, make_engine, small_model, some_requests

from grpo_cli.engine.scheduling import Lpt
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Prompt, Request


def test_a_predictor_sees_the_state_after_each_request_s_own_prefix_and_learns_from_the_same() -> None:
    seen, learnt = dict[Any, torch.Tensor](), dict[Any, torch.Tensor]()

    class Witness(Forgetful):
        def predict(self, requests: Any, hidden: Any) -> Any:
            seen.update(zip(requests, hidden, strict=True))
            return super().predict(requests, hidden)

        def learn(self, finished: Any, hidden: Any) -> None:
            learnt.update(zip(finished, hidden, strict=True))

    model = small_model()
    engine = make_engine(model, sampler=infinite(slots=3), scheduler=Lpt(), predictor=Witness())
    longer = [rollout for rollout in engine.generate(some_requests(prompts=3, n=4)) if len(rollout) > 3]
    assert set(learnt) == set(longer) and len(seen) == len(longer) < 12
    for rollout in longer:
        ids = torch.tensor([[*rollout.request.prompt.token_ids, *rollout.token_ids[:2]]])
        with torch.no_grad():
            state = model.model(ids).last_hidden_state[0, -1]
        torch.testing.assert_close(seen[rollout.request], state, atol=2e-5, rtol=0)
        assert torch.equal(learnt[rollout], seen[rollout.request])


def test_each_prompt_is_computed_once_and_decode_steps_are_the_schedule_s() -> None:
    model, requests = small_model(), some_requests(prompts=3, n=4)
    prompt_tokens = sum(len(r.prompt.token_ids) for r in requests[::4])
    engine = make_engine(model, sampler=infinite(slots=2), scheduler=AnyOrder())
    list(engine.generate(requests))
    assert engine.stats().prefill_tokens == prompt_tokens, "also where more prompts are open than there are slots"
    engine = make_engine(model, sampler=full())  # of others: test_schedule.py
    lengths = [len(rollout) for rollout in engine.generate(requests)]
    stats = engine.stats()
    assert (stats.generated_tokens, stats.decode_steps) == (sum(lengths), max(lengths) - 1)
    assert stats.slot_utilisation == pytest.approx((sum(lengths) - 12) / (stats.decode_steps * 12))


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    request = Request(Prompt("long", (3,) * 250, ""), 0, 0, Sampling.plain(7))
    with pytest.raises(UserError, match="sampling.max_new_tokens=7, together 257"):
        list(make_engine(small_model()).generate([request]))


# Steps of fixed shape


def test_few_shapes_occur_and_each_is_captured_once() -> None:
    """16 samples of one prompt in 8 slots. And two samples of one token, which comes without a step."""
    for sampler, n, tokens, captured in ((infinite(slots=8), 16, 64, (1, 2, 3)), (full(), 2, 1, (0,))):
        engine, capture = make_engine(small_model(), sampler=sampler), Again()
        engine._capture = lambda capture=capture: capture
        list(engine.generate(some_requests(prompts=1, n=n, tokens=tokens)))
        assert capture.captured in captured


def test_a_graph_is_refused_without_a_gpu_and_for_a_model_that_waits_for_the_host() -> None:
    for name, value in (("", 0), ("is_loaded_in_8bit", True), ("rope_type", "dynamic")):
        model = small_model()
        setattr(model if name.startswith("is_") else model.model.rotary_emb, name, value) if name else None
        with pytest.raises(UserError, match="engine.cuda_graph=true"):
            make_engine(model, cuda_graph=True)


@pytest.mark.triton
def test_a_gpu_s_steps_draw_the_tokens_that_a_cpu_s_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of Triton, interpreted, over rows that fill up a number: launched, recorded and repeated."""
    model, requests = small_model(), some_requests(prompts=2, n=2, tokens=6)
    plain = contents(make_engine(model, sampler=infinite(slots=3)).generate(requests))
    monkeypatch.setattr("grpo_cli.engine.decoder.runs_triton", lambda *_: True)
    engine, capture = make_engine(model, sampler=infinite(slots=3), native=False), Again()
    engine._capture = lambda: capture
    found = contents(engine.generate(requests))
    assert capture.replayed > 2 and len(found) == 4
    for key, (tokens, logprobs, *_) in plain.items():
        assert found[key][0] == tokens and found[key][1] == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("sampler", [full(), micro(slots=5), infinite(slots=3)])
@pytest.mark.parametrize("pauses", [False, True])
def test_a_cuda_graph_repeats_the_eager_step(sampler: Any, pauses: bool) -> None:
    """Twice, as a pool outlives the graphs that are thrown away: PyTorch's end with their last graph."""
    model, requests = small_model().to("cuda"), some_requests(prompts=4, n=4, tokens=40)
    found = []
    for graph in (False, True):
        prefix = dict(scheduler=Lpt(), predictor=prefix_head(prefix_tokens=8, min_rollouts=2)) if pauses else {}
        engine = make_engine(model, sampler=sampler, cuda_graph=graph, **prefix)
        found += [contents(engine.generate(requests)) for _ in range(2)]
    plain = found[0]
    for other in found[2:]:
        # Rounding differs with the shapes, and one token drawn otherwise changes all that follow.
        assert sum(plain[key][0] == other[key][0] for key in plain) >= 0.9 * len(plain)
