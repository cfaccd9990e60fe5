"""A rollout is a function of the weights and its request, whichever way it is made.

`POLICIES` lists what rollouts are made by, `WAYS` how. Every way makes the rollouts of a policy as one batch of all of
them does: to the bit, or, where a way adds up in another order (`ROUNDED`), token by token. Rollouts of Ray's workers
are compared in tests/cluster; vLLM draws from streams of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import made
import pytest
import torch
from made import fptas, infinite, micro, prefix_head
from orders import AnyOrder, Forgetful
from small import Again, adapted_model, contents, make_engine, require_bits, small_model, some_requests

from grpo_cli.config.instantiate import ready
from grpo_cli.engine import generation, products
from grpo_cli.engine.eviction import Dense
from grpo_cli.engine.scheduling import Lpt
from grpo_cli.engine.torch_engine import TorchEngine
from grpo_cli.model.load import load_model
from grpo_cli.support.errors import UserError
from grpo_cli.types import Request, Rollout


@dataclass(frozen=True)
class Policy:
    """What rollouts are made by."""

    model: Callable[[], Any] = small_model
    requests: Callable[[], list[Request]] = functools.partial(some_requests, prompts=3, n=6)
    sparsity: Any = field(default_factory=Dense)
    packed: bool = False  # whether weights as small as these are multiplied by packed copies


def embedded() -> Any:
    return load_model(made.model(), torch.device("cpu"))


def some_of_each() -> list[Request]:
    """Of several lengths and temperatures, with stop strings and without, of 1 token and of 60."""
    requests = []
    for i, one in enumerate(some_requests(prompts=4, n=6)):
        words = dict(max_new_tokens=(1, 4, 17, 60, 2, 9)[i % 6], temperature=(0.0, 0.5, 1.0)[i % 3])
        requests.append(replace(one, sampling=replace(one.sampling, **words, stop=("ab", "d")[: 2 * (i % 2)])))
    return requests


def evicting(policy: str, protect: bool) -> Policy:
    budget: dict[str, Any] = dict(budget=10, buffer=4, window=3, sinks=1, protect_prompt=protect, per_head=protect)
    model = functools.partial(small_model, num_key_value_heads=4 if protect else 1)
    return Policy(model, functools.partial(some_requests, tokens=40), ready("sparsity", policy, **budget))


WIDE = dict(hidden_size=576, intermediate_size=1536, head_dim=64, num_attention_heads=9, num_key_value_heads=3)
SHORT = functools.partial(some_requests, prompts=3, n=6, tokens=14)
# 240 rollouts at a time: enough rows that threads share the elements of a layer among them.
POLICIES = {
    "qwen2": Policy(),
    "qwen3": Policy(functools.partial(small_model, "qwen3", head_dim=16)),
    "llama": Policy(functools.partial(small_model, "llama", attention_bias=True, mlp_bias=True)),
    "mistral": Policy(functools.partial(small_model, "mistral", tie_word_embeddings=False)),
    "one key head": Policy(functools.partial(small_model, num_key_value_heads=1)),
    "a key head each": Policy(functools.partial(small_model, num_key_value_heads=4)),
    "576 wide": Policy(functools.partial(small_model, "llama", **WIDE), SHORT),  # as SmolLM2-135M
    "embedded": Policy(embedded, functools.partial(some_requests, prompts=12, n=20, tokens=16)),
    "packed": Policy(packed=True),
    "adapted, packed": Policy(adapted_model, packed=True),
    "all kinds of requests": Policy(requests=some_of_each),
    "streaming": evicting("streaming", True),
    "h2o": evicting("h2o", True),
    "h2o, prompt too": evicting("h2o", False),
    "snapkv, prompt too": evicting("snapkv", False),
    "rkv": evicting("rkv", True),
    "rkv, prompt too": evicting("rkv", False),
}

Make = Callable[..., TorchEngine]
Way = Callable[[Make, Sequence[Request]], Iterable[Rollout]]


def by(**parts: Callable[[], Any]) -> Way:
    """By an engine of these parts, which are made anew for each of its uses."""
    return lambda make, requests: make(**{name: new() for name, new in parts.items()}).generate(requests)


def with_prompts_read_in_parts(make: Make, requests: Sequence[Request]) -> Iterable[Rollout]:
    with patch.object(generation, "PREFILL_TOKENS", 64):
        yield from make().generate(requests)


def in_little_memory(sampler: Callable[..., Any]) -> Way:
    """In twice as much as one sequence takes: rollouts that begin make room for others, and are made again."""

    def way(make: Make, requests: Sequence[Request]) -> Iterator[Rollout]:
        with pytest.raises(UserError) as refused:
            list(make(sampler=sampler(kv_budget=1)).generate(requests))
        budget = 2 * int(str(refused.value).partition("set at least ")[2].partition(" bytes")[0])
        engine = make(sampler=sampler(kv_budget=budget), scheduler=AnyOrder())
        yield from engine.generate(requests)
        assert engine.stats().kv_peak_bytes <= budget

    return way


def by_steps_of_fixed_shape(make: Make, requests: Sequence[Request]) -> Iterator[Rollout]:
    """As a GPU graph repeats them."""
    engine, capture = make(sampler=infinite(slots=5)), Again()
    engine._capture = lambda: capture
    yield from engine.generate(requests)
    assert capture.replayed > capture.captured > 0


PREFIX: dict[str, Callable[[], Any]] = dict(
    sampler=lambda: infinite(slots=4), scheduler=Lpt, predictor=lambda: prefix_head(prefix_tokens=8, min_rollouts=2)
)
FORGETFUL: dict[str, Callable[[], Any]] = dict(sampler=lambda: infinite(slots=3), predictor=Forgetful)
WAYS: dict[str, Way] = {
    "each alone": lambda make, requests: (one for request in requests for one in make().generate([request])),
    "rounds": by(sampler=lambda: micro(slots=5)),
    "continuous": by(sampler=lambda: infinite(slots=7)),
    "in any order, one at a time": by(**FORGETFUL | {"scheduler": AnyOrder, "sampler": lambda: infinite(slots=1)}),
    "in any order": by(sampler=lambda: infinite(slots=2), scheduler=AnyOrder),
    "the longest first, in rounds": by(**FORGETFUL | {"sampler": lambda: micro(slots=3), "scheduler": Lpt}),
    "by a plan": by(**FORGETFUL | {"scheduler": fptas}),
    "paused after a prefix": by(**PREFIX),
    "prompts read in parts": with_prompts_read_in_parts,
    "little memory, in rounds": in_little_memory(micro),
    "little memory": in_little_memory(infinite),
    "captured": by_steps_of_fixed_shape,
    "no copies of weights": by(packed_weights=lambda: False),
    "in PyTorch's operations": by(native=lambda: False),
}
# Products in another order, with rounding of its own.
ROUNDED = {"no copies of weights", "in PyTorch's operations"}


@functools.cache
def of_all_at_once(name: str, threads: int) -> tuple[Any, Sequence[Request], Any]:
    """The model, the requests, and what their rollouts say."""
    policy = POLICIES[name]
    model, requests = policy.model(), policy.requests()
    require_bits(model)
    return model, requests, contents(maker(policy, model)().generate(requests))


def letters(token_ids: Sequence[int]) -> str:
    return "".join("_.abcdefghijklmnopqrstuvw"[token] for token in token_ids)


def maker(policy: Policy, model: Any) -> Make:
    words: dict[str, Any] = dict(sparsity=policy.sparsity, warn=made.unexpected, threads=torch.get_num_threads())
    if policy.requests is some_of_each:
        words["decode"] = letters
    return functools.partial(make_engine, model, **words)


def same(name: str, way: str) -> None:
    policy = POLICIES[name]
    with patch.object(products, "PACKED_FROM", 0 if policy.packed else products.PACKED_FROM):
        model, requests, expected = of_all_at_once(name, torch.get_num_threads())
        found = contents(WAYS[way](maker(policy, model), requests))
    if way not in ROUNDED:
        assert found == expected
        return
    assert found.keys() == expected.keys()
    for key, (tokens, logprobs, finish) in expected.items():
        assert (found[key][0], found[key][2]) == (tokens, finish)
        assert found[key][1] == pytest.approx(logprobs, abs=2e-4)


def same_in_short(model: Any, requests: Sequence[Request]) -> None:
    """The ways that differ most, for a model that is none of the table's."""
    make = functools.partial(make_engine, model)
    expected = contents(make().generate(requests))
    for way in ("rounds", "continuous", "paused after a prefix"):
        assert contents(WAYS[way](make, requests)) == expected


# Each policy and each way, in pairs.
PAIRS = list(zip(POLICIES, itertools.cycle(WAYS)))


@pytest.mark.parametrize(("policy", "way"), PAIRS)
def test_rollouts_are_the_same_whichever_way_they_are_made(policy: str, way: str) -> None:
    same(policy, way)


@pytest.mark.parametrize(
    ("policy", "threads"),
    [("576 wide", 2), ("embedded", 3), pytest.param("rkv, prompt too", 16, marks=pytest.mark.matrix)],
    indirect=["threads"],
)
def test_so_they_are_with_several_threads(policy: str, threads: int) -> None:
    same(policy, "continuous")
