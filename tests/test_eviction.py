"""Eviction: what each policy thinks of a key, which keys stay by that, what it costs, and that tokens were drawn with
the recorded probabilities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made import infinite, prefix_head
from small import make_engine, small_model, some_requests
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_cli.config.instantiate import ready
from grpo_cli.engine.eviction import Budget, Candidates, Dense
from grpo_cli.engine.evictor import Evictor
from grpo_cli.engine.kv_cache import BLOCK, blocks_for
from grpo_cli.engine.scheduling import Lpt
from grpo_cli.methods import rkv as r_kv
from grpo_cli.methods.h2o import H2o
from grpo_cli.methods.rkv import Rkv
from grpo_cli.methods.snapkv import SnapKv
from grpo_cli.methods.streaming_llm import Streaming
from grpo_cli.support.errors import UserError
from grpo_cli.types import Request, Rollout

HEADS, LAYERS = 2, 2  # of small_model, key-value heads
ROWS, GROUP, COUNT, DIM, SCALE = 3, 2, 13, 4, 0.5
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


# Scores by the book, one head at a time with plain loops


def slow_snapkv(keys: Tensor, queries: Tensor, scale: float, kernel: int) -> list[float]:
    """keys [T, D], queries [G, W, D]."""
    group, window = queries.shape[:2]
    old = len(keys) - window
    mean = [0.0] * old
    for step in range(window):
        logits = [max(scale * float(queries[g, step] @ keys[j]) for g in range(group)) for j in range(old)]
        top = max(logits)
        exponentials = [math.exp(logit - top) for logit in logits]
        for j in range(old):
            mean[j] += exponentials[j] / sum(exponentials) / window
    reach = kernel // 2
    return [max(mean[max(0, j - reach) : j + reach + 1]) for j in range(old)]


def slow_redundancy(keys: Tensor, threshold: float) -> list[float]:
    """keys [T, D]; one number per key, the window's included."""
    count = len(keys)
    cosine = [[float(torch.cosine_similarity(a, b, dim=0)) for b in keys] for a in keys]
    for i in range(count):
        cosine[i][i] = 0.0
    for i in range(count):
        similar = [j for j in range(count) if cosine[i][j] > threshold]
        cosine[i][similar[-1] if similar else 0] = 0.0
    means = [sum(cosine[i][j] for i in range(count)) / count for j in range(count)]
    total = sum(math.exp(mean) for mean in means)
    return [math.exp(mean) / total for mean in means]


def slow_scores(policy: Budget, keys: Tensor, queries: Tensor, scale: float, paid: list[list[float]]) -> list[float]:
    """The scores of one head: keys [T, D], queries [G, W, D]; `paid`: for each step, what it paid to each key (0 for
    keys that came later), already the mean over the group."""
    old = range(len(keys) - policy.window)
    if isinstance(policy, Streaming):
        return [float(place) for place in old]
    if isinstance(policy, H2o):
        return [sum(step[place] for step in paid) for place in old]
    assert isinstance(policy, SnapKv)
    attention = slow_snapkv(keys, queries, scale, policy.kernel)
    if not isinstance(policy, Rkv):
        return attention
    redundant = slow_redundancy(keys, policy.threshold)[: len(old)]
    return [policy.importance * a - (1 - policy.importance) * r for a, r in zip(attention, redundant, strict=True)]


def candidates(window: int, count: int = COUNT) -> Candidates:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(LAYERS, ROWS, HEADS, count, DIM, generator=generator)
    queries = 2 * torch.randn(LAYERS, ROWS, HEADS, GROUP, window, DIM, generator=generator)
    return Candidates(keys, window, SCALE, queries)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(("kernel", "threshold"), [(1, None), (3, None), (3, -1.0), (3, 0.2), (3, 1.0)])
def test_scores_are_what_a_loop_over_heads_finds(
    kernel: int, threshold: float | None, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of SnapKV, and of R-KV for a threshold of similarity."""
    words = WORDS | {"window": window, "budget": 12, "kernel": kernel}
    made = SnapKv(**words) if threshold is None else Rkv(**words, importance=0.3, threshold=threshold)
    these = candidates(window)
    for at_once in (1, 2 * COUNT**2, 10**9):  # in parts of one head, of two, and all in one
        monkeypatch.setitem(r_kv.SIMILARITIES_AT_ONCE, "cpu", at_once)
        scores = made.score(these)
        for place in itertools.product(range(LAYERS), range(ROWS), range(HEADS)):
            slow = slow_scores(made, these.keys[place], these.queries[place], SCALE, [])
            torch.testing.assert_close(scores[place], torch.tensor(slow), atol=2e-6, rtol=1e-5)


class Given(Budget):
    """Scores made up beforehand."""

    made_up: Tensor

    def score(self, candidates: Candidates) -> Tensor:
        return self.made_up


@settings(max_examples=40)
@given(st.data())
def test_what_stays_is_the_window_the_sinks_and_the_best_of_the_rest(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(window + 1, 12))
    most_sinks = data.draw(st.integers(0, count - window))
    budget = data.draw(st.integers(window + most_sinks, count))
    sinks = data.draw(st.lists(st.integers(0, most_sinks), min_size=ROWS, max_size=ROWS))
    places = LAYERS * ROWS * HEADS * (count - window)
    values = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=places, max_size=places))  # full of ties
    policy = Given(**WORDS | dict(budget=budget, window=window, sinks=most_sinks))
    object.__setattr__(policy, "made_up", torch.tensor(values).view(LAYERS, ROWS, HEADS, count - window))
    kept = policy.choose(candidates(window, count), torch.tensor(sinks))
    assert kept.shape == (LAYERS, ROWS, HEADS, budget)
    for place in itertools.product(range(LAYERS), range(ROWS), range(HEADS)):
        scores, row = policy.made_up[place].tolist(), sinks[place[1]]
        order = sorted(range(count - window), key=lambda j: (j >= row, -scores[j], j))  # of equals the older stays
        assert kept[place].tolist() == sorted([*order[: budget - window], *range(count - window, count)])


def test_a_budget_that_cannot_work_is_refused_with_what_would() -> None:
    plain = WORDS | {"kernel": 3, "importance": 0.1, "threshold": 0.5}
    for words, complaint in (
        ({"budget": 7, "window": 5, "sinks": 3}, "sparsity.budget=7"),
        ({"buffer": 0, "kernel": 0}, "(?s)sparsity.buffer=0.*sparsity.kernel=0"),
        ({"kernel": 4}, "sparsity.kernel=4 must be odd"),
    ):
        with pytest.raises(UserError, match=complaint):
            ready("sparsity", "rkv", **plain | words)


@contextmanager
def noted() -> Iterator[dict[int, list[tuple[int, Tensor]]]]:
    """Every eviction of every request: (prompt keys among the candidates, kept places [L, H, B])."""
    evictions: dict[int, list[tuple[int, Tensor]]] = {}
    evict = Evictor.evict

    def evicting(evictor: Evictor, sequences: Sequence[Any], cache: Any) -> Tensor:
        prompt, kept = evictor.of_prompt(sequences[0]), evict(evictor, sequences, cache)
        for row, sequence in enumerate(sequences):
            evictions.setdefault(sequence.index, []).append((prompt, kept[:, row].clone()))
            assert len(sequence.blocks) == blocks_for(evictor.policy.budget + 1), "for the next key, and no more"
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
def test_a_rollout_is_what_its_evictions_say(policy: type[Budget], words: Any, parts: Any) -> None:
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


def test_blocks_that_are_not_needed_after_an_eviction_are_given_back_at_once() -> None:
    """Each time 30 keys were in 4 blocks, and 10 and the next one are in 2."""
    with noted() as evictions:
        generate(make(Streaming, buffer=20), some_requests(prompts=1, n=2, tokens=60), eos_token_ids=())
    assert [len(some) for some in evictions.values()] == [2, 2]


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
