"""Rollouts under eviction: what is kept, what it costs, and that tokens were drawn with the recorded probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from made import infinite, prefix_head
from slow_eviction import slow_scores
from small import make_engine, small_model, some_requests
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_cli.engine.eviction import Budget, Dense, Evictor
from grpo_cli.engine.kv_cache import BLOCK, blocks_for
from grpo_cli.engine.scheduling import Lpt
from grpo_cli.methods.h2o import H2o
from grpo_cli.methods.rkv import Rkv
from grpo_cli.methods.snapkv import SnapKv
from grpo_cli.methods.streaming_llm import Streaming
from grpo_cli.types import Request, Rollout

HEADS, LAYERS = 2, 2  # of small_model, key-value heads
WORDS: dict[str, Any] = dict(budget=10, buffer=4, window=3, sinks=1, protect_prompt=True, per_head=True)
OWN_WORDS: dict[type[Budget], dict[str, Any]] = {
    Streaming: {},
    H2o: {},
    SnapKv: {"kernel": 3},
    Rkv: {"kernel": 3, "importance": 0.3, "threshold": 0.5},
}
KINDS = [
    pytest.param(policy, {"protect_prompt": protect, "per_head": protect}, id=f"{policy.__name__}-{protect}")
    for policy, protect in itertools.product(OWN_WORDS, (True, False))
]


def make(policy: type[Budget], **words: Any) -> Budget:
    return policy(**WORDS | OWN_WORDS[policy] | words)


@contextmanager
def noted() -> Iterator[dict[int, list[tuple[int, Tensor]]]]:
    """Every eviction of every request: (prompt keys among the candidates, kept places [L, H, B])."""
    evictions: dict[int, list[tuple[int, Tensor]]] = {}
    evict = Evictor.evict

    def evicting(evictor: Evictor, sequences: Sequence[Any], cache: Any) -> Tensor:
        prompt, kept = evictor.of_prompt(sequences[0]), evict(evictor, sequences, cache)
        for row, sequence in enumerate(sequences):
            evictions.setdefault(sequence.index, []).append((prompt, kept[:, row].clone()))
        return kept

    with patch.object(Evictor, "evict", evicting):
        yield evictions


def generate(policy: Dense | Budget, requests: list[Request], **parts: Any) -> tuple[list[Rollout], Any]:
    """Rollouts in the order of their requests, and the engine."""
    engine = make_engine(small_model(), sparsity=policy, **parts)
    return sorted(engine.generate(requests), key=lambda rollout: requests.index(rollout.request)), engine


def histories(rollout: Rollout, evictions: list[tuple[int, Tensor]], protect: bool) -> Iterator[tuple[int, Any, Any]]:
    """Before each fed token: its position, the candidates' positions if there is an eviction (and what was kept), and
    the positions held afterwards; the last two as lists by (layer, head). Read off the record alone."""
    start = len(rollout.request.prompt.token_ids)
    before = [] if protect else list(range(start))
    held = {place: list(before) for place in itertools.product(range(LAYERS), range(HEADS))}
    left = list(evictions)
    for position in range(start, start + len(rollout) - 1):
        event = None
        if left and len(held[0, 0]) == int(left[0][1][0, 0, -1]) + 1:  # the latest candidate is always kept
            kept = left.pop(0)[1]
            event = {place: (list(held[place]), kept[place].tolist()) for place in held}
            held = {place: [held[place][index] for index in kept[place].tolist()] for place in held}
        yield position, event, held
        held = {place: [*positions, position] for place, positions in held.items()}
    assert not left, "every recorded eviction has its place in the rollout"


def visible(rollout: Rollout, evictions: list[tuple[int, Tensor]], protect: bool) -> Tensor:
    """Which position sees which, [layers, heads, T, T], by the recorded evictions."""
    start, total = len(rollout.request.prompt.token_ids), len(rollout.request.prompt.token_ids) + len(rollout)
    mask = torch.ones(total, total, dtype=torch.bool).tril().repeat(LAYERS, HEADS, 1, 1)
    mask[:, :, start:] = False
    for position, _, held in histories(rollout, evictions, protect):
        for (layer, head), positions in held.items():
            mask[layer, head, position, [*positions, position]] = True
    if protect:
        mask[:, :, start:, :start] = True
    return mask


class Replayed:
    """A forward pass of plain `transformers` over a whole rollout, under a mask; notes what attention was made of."""

    def __init__(self, rollout: Rollout, mask: Tensor) -> None:
        self.queries: list[Tensor] = []  # of each layer [heads, T, D], rotated
        self.keys: list[Tensor] = []
        self.weights: list[Tensor] = []
        self._mask = mask
        ALL_ATTENTION_FUNCTIONS.register("replayed", self._attend)
        model = small_model()
        model.config._attn_implementation = "replayed"
        ids = torch.tensor([[*rollout.request.prompt.token_ids, *rollout.token_ids]])
        start = len(rollout.request.prompt.token_ids)
        with torch.no_grad():
            logprobs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        self.logprobs = logprobs.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **__: Any
    ) -> tuple[Tensor, None]:
        (query,), (key,), (value,) = query, key, value
        mask = self._mask[module.layer_idx].repeat_interleave(2, dim=0)
        scores = (query @ key.repeat_interleave(2, 0).mT * scaling).masked_fill(~mask, -torch.inf)
        # The last token is never fed in the engine; here it sees nothing, and nobody asks what it says.
        weights = scores.softmax(-1).nan_to_num()
        self.queries.append(query)
        self.keys.append(key)
        self.weights.append(weights)
        self.scaling = scaling
        return (weights @ value.repeat_interleave(2, 0)).transpose(0, 1)[None], None


PAUSED: dict[str, Any] = dict(sampler=infinite(slots=2), scheduler=Lpt(), predictor=prefix_head(prefix_tokens=16))


@pytest.mark.parametrize("parts", [{"sampler": infinite(slots=4)}, PAUSED], ids=["", "paused"])
@pytest.mark.parametrize(("policy", "words"), KINDS)
def test_a_rollout_is_what_its_evictions_say(
    policy: type[Budget], words: dict[str, Any], parts: dict[str, Any]
) -> None:
    """The sampler's log-probabilities are those of a replay under the recorded masks, and not the dense ones; each
    recorded choice is the one of scores computed by slow loops from the replay's own queries, keys and weights."""
    requests = some_requests(prompts=2, n=3, tokens=40)
    budget = make(policy, **words, sinks=6 if policy is Streaming else 1)
    with noted() as noticed:
        rollouts, _ = generate(budget, requests, **parts)
    differences = []
    for index, rollout in enumerate(rollouts):
        evictions = noticed.get(index, [])
        check_record(budget, len(rollout.request.prompt.token_ids), evictions)
        replay = Replayed(rollout, visible(rollout, evictions, budget.protect_prompt))
        sampled = torch.tensor(rollout.sampler_logprobs)
        torch.testing.assert_close(sampled, replay.logprobs, atol=3e-5, rtol=0)
        differences.append(float((Replayed(rollout, visible(rollout, [], True)).logprobs - sampled).abs().max()))
        check_choices(budget, rollout, evictions, replay)
    assert sum(map(len, noticed.values())) >= 6 and max(differences) > 0.01


def check_record(budget: Budget, prompt: int, evictions: list[tuple[int, Tensor]]) -> None:
    """When it came to each, and that the first positions of the sequence stay."""
    for number, (prompt_candidates, kept) in enumerate(evictions):
        sinks = max(budget.sinks - prompt, 0) if budget.protect_prompt else budget.sinks
        assert (kept[..., :sinks] == torch.arange(sinks)).all()
        assert prompt_candidates == (prompt if number == 0 and not budget.protect_prompt else 0)
        # Of a prompt longer than the budget, nothing goes before the row has made a window of its own.
        assert int(kept.max()) + 1 == max(budget.budget + budget.buffer, prompt_candidates + budget.window)


def check_choices(budget: Budget, rollout: Rollout, evictions: list[tuple[int, Tensor]], replay: Replayed) -> None:
    start = len(rollout.request.prompt.token_ids)
    for position, event, _ in histories(rollout, evictions, budget.protect_prompt):
        if event is None:
            continue
        scores = {}
        for (layer, head), (places, _) in event.items():
            group = slice(2 * head, 2 * head + 2)
            queries = replay.queries[layer][group, position - budget.window : position]
            paid = replay.weights[layer][group, (start if budget.protect_prompt else 0) : position].mean(0)[:, places]
            keys = replay.keys[layer][head][places]
            scores[layer, head] = torch.tensor(slow_scores(budget, keys, queries, replay.scaling, paid.tolist()))
        for (layer, head), (places, kept) in event.items():
            mine = scores[layer, head] if budget.per_head else scores[layer, 0] + scores[layer, 1]
            free = [i for i in range(len(mine)) if places[i] >= budget.sinks]
            stayed, went = (mine[[i for i in free if (i in kept) is there]] for there in (True, False))
            assert stayed.min() >= went.max() - 1e-5


@pytest.mark.parametrize(("policy", "words"), KINDS)
def test_a_budget_that_is_never_reached_is_dense_bit_for_bit(policy: type[Budget], words: dict[str, Any]) -> None:
    requests = some_requests(prompts=2, n=2, tokens=31)
    longest = 30 + (0 if words["protect_prompt"] else max(len(r.prompt.token_ids) for r in requests))
    dense, dense_engine = generate(Dense(), requests, eos_token_ids=())
    for budget, buffer in ((longest - 4, 4), (500, 1)):  # just enough, and far too much
        rollouts, engine = generate(make(policy, **words, budget=budget, buffer=buffer), requests, eos_token_ids=())
        stats = engine.stats()
        assert rollouts == dense and stats.kv_peak_bytes == dense_engine.stats().kv_peak_bytes
        assert stats.details["engine/evictions"] == 0
    _, engine = generate(make(policy, **words, budget=longest - 5, buffer=4), requests, eos_token_ids=())
    assert engine.stats().details["engine/evictions"] == (4 if words["protect_prompt"] else 2), "one key less"


def test_memory_is_what_the_shapes_say_and_half_of_it_makes_twice_the_slots() -> None:
    """256 bytes a token; 28 + 4 = 32 keys a sequence where dense completions need 64."""
    requests = some_requests(prompts=2, n=5, tokens=65)
    widths = [BLOCK * blocks_for(len(r.prompt.token_ids)) for r in requests[::5]]
    _, engine = generate(make(Streaming, budget=28), requests, eos_token_ids=())
    assert engine.stats().kv_peak_bytes == 256 * (10 * 32 + sum(widths))
    budget = 256 * (2 * max(widths) + 4 * 64)
    for sparsity, slots in ((Dense(), 4), (make(SnapKv, budget=28), 8)):
        _, engine = generate(sparsity, requests, sampler=infinite(kv_budget=budget))
        assert engine.stats().slots >= slots and engine.stats().kv_peak_bytes <= budget
