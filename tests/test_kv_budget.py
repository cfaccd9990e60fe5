"""Keys and values never take more bytes than `sampler.kv_budget`, and what fits is served, with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import exp
from statistics import NormalDist
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made import fptas, full, infinite, mean_length, micro, prefix_head
from orders import AnyOrder, Backwards, Forgetful, PromptsFirst
from small import VOCABULARY, contents, make_engine, small_model, some_requests

from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.eviction import Dense
from grpo_cli.engine.kv_cache import BLOCK, PagedCache, round_up
from grpo_cli.engine.length_predictor import GivenLengths, NoPredictor
from grpo_cli.engine.samplers import KvShape
from grpo_cli.engine.scheduling import Fifo, Lpt, Sjf
from grpo_cli.methods.rkv import Rkv
from grpo_cli.methods.streaming_llm import Streaming
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import parse_bytes
from grpo_cli.types import Request

TOKEN = 256  # bytes of small_model: 2 layers x keys and values x 2 heads x 8 numbers of 4
MODEL = small_model()
DENSE = Dense()


class Ledger:
    """The blocks that are taken and given back, by one generation at a time; asks the engine nothing."""

    def __init__(self, token: int = TOKEN) -> None:
        self.peak, self._token = 0, token  # bytes up to the highest block that was taken
        self._taken: set[int] = set()

    @contextmanager
    def open(self) -> Iterator[None]:
        take, give_back = PagedCache.take, PagedCache.give_back

        def taken(cache: PagedCache, blocks: int) -> list[int]:
            found = take(cache, blocks)
            assert not self._taken & {*found}, "a block has one owner"
            self._taken |= {*found}
            self.peak = max([self.peak, *((block + 1) * BLOCK * self._token for block in found)])
            return found

        def given(cache: PagedCache, blocks: Any) -> None:
            assert self._taken >= {*blocks}, "only what was taken comes back"
            self._taken -= {*blocks}
            give_back(cache, blocks)

        with patch.object(PagedCache, "take", taken), patch.object(PagedCache, "give_back", given):
            yield
        assert not self._taken, "all blocks come back"


def generate(requests: Sequence[Request], **parts: Any) -> tuple[Any, Any, Ledger]:
    """What rollouts say, the engine, and what really lay there."""
    engine, ledger = make_engine(MODEL, **{"warn": lambda text: None} | parts), Ledger()
    with ledger.open():
        made = contents(engine.generate(requests))
    return made, engine, ledger


def least_budget(requests: Sequence[Request], sparsity: Any = DENSE) -> int:
    """What one sequence takes, as the engine says when it is given a byte."""
    with pytest.raises(UserError) as refused:
        generate(requests, sampler=infinite(kv_budget=1), sparsity=sparsity)
    return int(str(refused.value).partition("would do is ")[2].partition(" bytes")[0])


def prompt_bytes(requests: Sequence[Request]) -> int:
    """Of the longest prompt, in whole tiles."""
    return TOKEN * round_up(max(len(r.prompt.token_ids) for r in requests), BLOCK)


def ending_at(requests: Sequence[Request], limits: Sequence[int]) -> list[Request]:
    """The same with limits of their own, where nothing else ends them."""
    words = [replace(r.sampling, max_new_tokens=limit) for r, limit in zip(requests, limits, strict=True)]
    return [replace(r, sampling=word) for r, word in zip(requests, words, strict=True)]


def slot_bytes(tokens: int) -> int:
    return TOKEN * round_up(tokens - 1, BLOCK)


SCHEDULERS = [Fifo, Sjf, Lpt, fptas, lambda: fptas(refill="lpt"), Backwards, PromptsFirst, AnyOrder]
PREDICTORS = [NoPredictor, mean_length, Forgetful, lambda: prefix_head(prefix_tokens=3, min_rollouts=2)]
WORDS: dict[str, Any] = dict(budget=6, buffer=3, window=2, sinks=1, per_head=True)
SPARSITIES = [
    Dense(),
    Streaming(**WORDS, protect_prompt=True),
    Rkv(**WORDS, protect_prompt=False, kernel=3, importance=0.3, threshold=0.5),
]


@pytest.mark.bits
@settings(max_examples=20)
@given(
    make=st.sampled_from([micro, infinite]),
    chosen=st.tuples(*map(st.sampled_from, (SCHEDULERS, PREDICTORS, SPARSITIES))),
    slots=st.none() | st.integers(1, 6),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 60), st.integers(0, 99)),
    share=st.floats(0, 1.2),
)
def test_no_order_of_rollouts_ever_holds_more_than_the_budget_or_changes_one(
    make: Any, chosen: Any, slots: int | None, shape: tuple[int, int, int, int], share: float
) -> None:
    (scheduler, predictor, sparsity), (prompts, n, tokens, seed) = chosen, shape
    requests = some_requests(prompts=prompts, n=n, tokens=tokens, seed=seed)
    full, ledger = make_engine(MODEL, sparsity=sparsity), Ledger()
    with ledger.open():
        rollouts = list(full.generate(requests))
    assert full.stats().kv_peak_bytes == ledger.peak
    least = least_budget(requests, sparsity)
    budget = least + int(share * max(0, full.stats().kv_peak_bytes - least))
    parts: dict[str, Any] = dict(sampler=make(slots=slots, kv_budget=budget), scheduler=scheduler())
    parts |= dict(predictor=predictor(), sparsity=sparsity)
    parts["predictor"].learn(rollouts, torch.zeros(len(requests), 32))
    made, engine, ledger = generate(requests, **parts)
    assert made == contents(rollouts)
    assert engine.stats().kv_peak_bytes == ledger.peak <= budget


@pytest.mark.bits
@pytest.mark.parametrize("make", [micro, infinite])
@pytest.mark.parametrize("parts", [{}, {"scheduler": PromptsFirst()}, {"scheduler": Sjf(), "predictor": Forgetful()}])
def test_room_for_one_sequence_serves_them_all_and_a_byte_less_none(make: Any, parts: Any) -> None:
    requests = some_requests(prompts=3, n=3, tokens=40)
    least = slot_bytes(40) + prompt_bytes(requests)
    with pytest.raises(UserError, match=rf"holds not even one sequence; the least that would do is {least} bytes"):
        generate(requests, sampler=make(kv_budget=least - 1), **parts)
    made, engine, ledger = generate(requests, sampler=make(kv_budget=least), **parts)
    assert made == contents(make_engine(MODEL).generate(requests)) and ledger.peak <= least


def test_as_many_rows_as_have_a_page_and_as_many_to_their_end_as_fit_with_their_prompts() -> None:
    shape = KvShape(requests=40, prompts=4, prompt_bytes=10, page_bytes=20, slot_bytes=100)
    rows = [infinite(kv_budget=budget).fit(shape).slots for budget in (110, 129, 130, 809, 810, 10**6)]
    assert rows == [5, 5, 6, 39, 40, 40]
    assert [shape.slots(budget) for budget in (110, 219, 220, 440, 539, 540, 639, 640)] == [1, 1, 2, 4, 4, 5, 5, 6]
    assert infinite(kv_budget=10**6, slots=3).fit(shape).slots == 3


@pytest.mark.parametrize(
    ("sampler", "probes", "enough"),
    [
        # 6 prompts of 10 bytes and 12 rollouts that wait with 20 take 300 bytes, with 2 slots of 100 they take 500; as
        # much holds 4 slots with a prompt each (440) and not 5 (550). With 499, one slot would be left of 4.
        (infinite(kv_budget=499), False, 500),
        (infinite(kv_budget=500), True, 0),
        (infinite(kv_budget=10**6), False, 0),
        # With no more than 2 slots at any rate, one of them is half.
        (infinite(kv_budget=399, slots=2), False, 400),
        (infinite(kv_budget=400, slots=2), True, 0),
        (infinite(kv_budget=500, slots=2), True, 0),
        (full(), False, 0),
        (infinite(slots=12), False, 0),
        (infinite(slots=3), True, 0),
    ],
)
def test_a_prefix_of_everybody_may_cost_half_of_the_slots_and_no_more(sampler: Any, probes: bool, enough: int) -> None:
    room = sampler.fit(
        KvShape(requests=12, prompts=6, prompt_bytes=10, page_bytes=100, slot_bytes=100, parked_bytes=20)
    )
    assert (room.probes, room.probes_with, room.budget is None) == (probes, enough, sampler.kv_budget is None)
    assert sampler.slots is None or room.slots == sampler.slots


@pytest.mark.bits
def test_without_room_for_a_prefix_it_is_said_once_with_the_bytes_that_would_do() -> None:
    requests, said = some_requests(prompts=3, n=4, tokens=40), list[str]()
    wanted = contents(make_engine(MODEL).generate(requests))
    parts: dict[str, Any] = dict(scheduler=Lpt(), predictor=Forgetful(), warn=said.append)
    budget = slot_bytes(40) + prompt_bytes(requests)
    engine = make_engine(MODEL, sampler=infinite(kv_budget=budget), **parts)
    for _ in range(2):
        assert contents(engine.generate(requests)) == wanted
        assert "engine/probe_steps" not in engine.stats().details
    (text,) = said
    enough = int(text.partition(" bytes, or")[0].rpartition(" ")[2])
    for given_bytes, probes in ((enough - 1, False), (enough, True)):
        made, engine, ledger = generate(requests, sampler=infinite(kv_budget=given_bytes), **parts)
        assert made == wanted and ledger.peak <= given_bytes
        assert ("engine/probe_steps" in engine.stats().details) == probes
    assert len(said) == 2, "one of each engine that has no room"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_memory_is_not_left_idle_while_somebody_waits(scheduler: Any) -> None:
    """Where as much as three sequences take is there, at least two run at a time on average, whatever the order."""
    requests = some_requests(prompts=6, n=4, tokens=20)
    budget = 3 * (slot_bytes(20) + prompt_bytes(requests))
    engine = make_engine(MODEL, sampler=infinite(kv_budget=budget), scheduler=scheduler())
    steps = sum(len(rollout) - 1 for rollout in engine.generate(requests))
    if scheduler is not AnyOrder:  # who leaves slots empty of its own accord
        assert engine.stats().decode_steps <= (steps + 19) / 2, "Graham's bound, 19 being the longest"


@pytest.mark.bits
def test_who_is_put_off_makes_the_same_tokens_again() -> None:
    """Lengths that nobody can foresee: 23 short rollouts make place for 9 that all go on to the end."""
    limits = [4] * 23 + [96] * 9
    requests = ending_at(some_requests(prompts=4, n=8, tokens=96), limits)
    parts: dict[str, Any] = dict(eos_token_ids=(VOCABULARY,))
    wanted = contents(make_engine(MODEL, **parts).generate(requests))
    budget = 3 * least_budget(requests)
    made, engine, ledger = generate(requests, sampler=infinite(kv_budget=budget), **parts)
    stats = engine.stats()
    assert made == wanted and ledger.peak <= budget
    assert stats.details["engine/restarts"] > 0 and stats.details["engine/restarted_tokens"] > 0
    assert stats.generated_tokens == sum(limits), "what was made twice counts once"


@pytest.mark.parametrize("budget", [None, "128KiB"])
def test_what_is_allocated_follows_what_is_held(budget: Any) -> None:
    """Of slots that reserved the limit, 32 rollouts of log-normal lengths would take 32 x 256 x 256 bytes = 2 MiB."""
    model = small_model(max_position_embeddings=512)
    quantiles = [exp(3.81 + 0.833 * NormalDist().inv_cdf((i + 0.5) / 32)) for i in range(32)]
    limits = np.random.default_rng(0).permutation(np.clip(np.rint(quantiles), 1, 256)).astype(int).tolist()
    requests = ending_at(some_requests(prompts=4, n=8, tokens=256), limits)
    sampler = infinite(slots=32) if budget is None else infinite(kv_budget=budget)
    engine = make_engine(model, sampler=sampler, eos_token_ids=(VOCABULARY,))
    list(engine.generate(requests))
    stats = engine.stats()
    assert stats.kv_peak_bytes <= 1.4 * stats.details["engine/kv_held_bytes"], "blocks of 16 for a mean of 40"
    if budget is not None:
        reserved = parse_bytes(budget) // (slot_bytes(256) + prompt_bytes(requests))
        assert stats.kv_peak_bytes <= parse_bytes(budget) and stats.slots >= 2 * reserved


def test_as_many_rollouts_run_as_there_is_room_for_what_eviction_leaves() -> None:
    """However long they will be: 12 run at a time where 12 pages are, though 100 tokens of each would not fit."""
    sparsity = Streaming(**WORDS, protect_prompt=True)
    requests = some_requests(prompts=1, n=24, tokens=100)
    page = TOKEN * round_up(sparsity.capacity(100, 200), BLOCK)
    budget = prompt_bytes(requests) + 12 * page
    _, engine, ledger = generate(
        requests, sampler=infinite(kv_budget=budget), sparsity=sparsity, eos_token_ids=(VOCABULARY,)
    )
    stats = engine.stats()
    assert ledger.peak == budget and stats.details["engine/rows_mean"] == 12.0
    assert stats.decode_steps == 2 * 99 and stats.details.get("engine/restarts", 0.0) == 0.0


@pytest.mark.parametrize("again", [False, True])
def test_a_prompt_is_read_again_if_it_was_dropped_for_one_that_comes_before_its_next_sample(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts in turn, both samples of one run before the next prompt has room, as a sample of a prompt that lies
    there needs less. Of the longest first, another prompt comes between a long and a short sample."""
    requests = some_requests(prompts=4, n=2, tokens=60 if again else 20)
    parts: dict[str, Any] = dict(scheduler=PromptsFirst())
    if again:
        requests = ending_at(requests, [33, 30, 32, 28, 33, 20, 33, 20])
        lengths = {r: float(r.sampling.max_new_tokens) for r in requests}
        parts = dict(scheduler=Lpt(), predictor=GivenLengths(lengths), eos_token_ids=(VOCABULARY,))
    read, prefill = list[int](), Decoder.prefill

    def counted(decoder: Decoder, prompts: Sequence[Sequence[int]], received: bool) -> Any:
        read.extend(map(len, prompts))
        return prefill(decoder, prompts, received)

    monkeypatch.setattr(Decoder, "prefill", counted)
    _, engine, _ = generate(requests, sampler=infinite(kv_budget=least_budget(requests)), **parts)
    assert engine.stats().prefill_tokens == sum(read)
    assert (sum(read) > sum(len(r.prompt.token_ids) for r in requests[::2])) == again
