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
from orders import AnyOrder, Forgetful
from small import VOCABULARY, contents, make_engine, small_model, some_requests

from grpo_cli.engine.eviction import Dense
from grpo_cli.engine.kv_cache import BLOCK, KvLayout, PagedCache, round_up
from grpo_cli.engine.length_predictor import NoPredictor
from grpo_cli.engine.samplers import KvPlan
from grpo_cli.engine.scheduling import Fifo, Lpt, Sjf
from grpo_cli.methods.rkv import Rkv
from grpo_cli.methods.streaming_llm import Streaming
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Prompt, Request

TOKEN = 256  # bytes of small_model: 2 layers x keys and values x 2 heads x 8 numbers of 4
MODEL = small_model()
DENSE = Dense()


class Ledger:
    """The blocks that are taken and given back, by one generation at a time; asks the engine nothing."""

    def __init__(self) -> None:
        self.peak = 0  # bytes up to the highest block that was taken

    @contextmanager
    def open(self) -> Iterator[None]:
        take, give_back, owned = PagedCache.take, PagedCache.give_back, set[int]()

        def taken(cache: PagedCache, blocks: int) -> list[int]:
            found = take(cache, blocks)
            assert not owned & {*found}, "a block has one owner"
            owned.update(found)
            self.peak = max([self.peak, *((block + 1) * BLOCK * TOKEN for block in found)])
            return found

        def given(cache: PagedCache, blocks: Any) -> None:
            assert owned >= {*blocks}, "only what was taken comes back"
            owned.difference_update(blocks)
            give_back(cache, blocks)

        with patch.object(PagedCache, "take", taken), patch.object(PagedCache, "give_back", given):
            yield
        assert not owned, "all blocks come back"


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


def sequence_bytes(requests: Sequence[Request], tokens: int) -> int:
    """Of the longest prompt and of so many tokens, of which the last is never fed, in whole blocks."""
    longest = max(len(request.prompt.token_ids) for request in requests)
    return TOKEN * (round_up(longest, BLOCK) + round_up(tokens - 1, BLOCK))


def ending_at(requests: Sequence[Request], limits: Sequence[int]) -> list[Request]:
    """The same with limits of their own, where nothing else ends them."""
    words = [replace(r.sampling, max_new_tokens=limit) for r, limit in zip(requests, limits, strict=True)]
    return [replace(r, sampling=word) for r, word in zip(requests, words, strict=True)]


SCHEDULERS = [Fifo, Sjf, Lpt, fptas, lambda: fptas(refill="lpt"), AnyOrder]
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


def plan_of(sampler: Any, requests: int, prompts: int, prefix: int = 0, sparsity: Any = DENSE) -> KvPlan:
    """For prompts of one block and 64 keys, which are 4 blocks of 16 x 256 bytes."""
    asked = [Prompt(str(i), (3,) * 16, "") for i in range(prompts)]
    some = [Request(asked[i % prompts], i, i, Sampling.plain(65)) for i in range(requests)]
    layout = KvLayout(2, 2, 8, torch.float32)
    return KvPlan.of(layout, sampler, sparsity, some, None, prefix, pauses=False)


def test_as_many_sequences_begin_as_have_a_block_beside_a_prompt() -> None:
    for blocks, slots in ((5, 4), (6, 5), (40, 39), (41, 40), (999, 40)):
        plan = plan_of(infinite(kv_budget=4096 * blocks + 4095), 40, 4)
        assert (plan.slots, plan.blocks) == (slots, min(blocks, 4 + 160))
    assert plan_of(infinite(kv_budget=4096 * 99, slots=3), 40, 4).slots == 3
    plan = plan_of(infinite(slots=3), 40, 4, sparsity=Streaming(**WORDS, protect_prompt=True))
    assert (plan.blocks, plan.own_blocks, plan.saved) == (4 + 3, 1, 1 - 7 / 16)
    assert plan_of(infinite(), 40, 4).slots == 16 and plan_of(full(), 40, 4).slots == 40
    # An evaluation runs as many at a time as a step, or 128.
    assert [full().slots_for(300, per_step) for per_step in (None, 16, 200, 512)] == [128, 128, 200, 300]


@pytest.mark.parametrize(
    ("sampler", "parked", "lacks"),
    [
        # 6 prompts and 12 rollouts that wait with a block each take 18, and each slot 4. In 29 blocks that leaves 2 of
        # the 5 slots that would fit with a prompt each, in 30 it leaves 3 of 6, and in 54 all 12 fit.
        *(
            (infinite(kv_budget=4096 * blocks), *plan)
            for blocks, *plan in ((29, 0, True), (30, 1, False), (54, 0, False))
        ),
        (infinite(kv_budget=4096 * 21, slots=2), 0, True),
        (infinite(slots=3), 1, False),
    ],
)
def test_a_prefix_of_everybody_may_cost_half_of_the_slots(sampler: Any, parked: int, lacks: bool) -> None:
    plan = plan_of(sampler, 12, 6, prefix=16)
    assert (plan.parked_blocks, plan.lacks_room) == (parked, lacks)


@pytest.mark.parametrize("scheduler", [Fifo, Lpt, fptas, AnyOrder])
def test_memory_is_not_left_idle_while_somebody_waits(scheduler: Any) -> None:
    """Where as much as three sequences take is there, at least two run at a time on average, whatever the order."""
    requests = some_requests(prompts=6, n=4, tokens=20)
    sampler = infinite(kv_budget=3 * sequence_bytes(requests, 20))
    engine = make_engine(MODEL, sampler=sampler, scheduler=scheduler())
    steps = sum(len(rollout) - 1 for rollout in engine.generate(requests))
    assert engine.stats().decode_steps <= (steps + 19) / 2, "Graham's bound, 19 being the longest"


@pytest.mark.bits
def test_who_is_put_off_makes_the_same_tokens_again_and_a_byte_less_than_one_sequence_is_refused() -> None:
    """Lengths that nobody can foresee: 23 short rollouts make place for 9 that all go on to the end."""
    limits = [4] * 23 + [96] * 9
    requests = ending_at(some_requests(prompts=4, n=8, tokens=96), limits)
    parts: dict[str, Any] = dict(eos_token_ids=(VOCABULARY,))
    wanted, least = contents(make_engine(MODEL, **parts).generate(requests)), sequence_bytes(requests, 96)
    assert least_budget(requests) == least
    with pytest.raises(UserError, match=rf"sampler.kv_budget.*{least} bytes"):
        generate(requests, sampler=micro(kv_budget=least - 1))
    made, engine, ledger = generate(requests, sampler=infinite(kv_budget=3 * least), **parts)
    stats = engine.stats()
    assert made == wanted and ledger.peak <= 3 * least
    assert stats.details["engine/restarts"] > 0 and stats.details["engine/restarted_tokens"] > 0
    assert stats.generated_tokens == sum(limits), "what was made twice counts once"


def test_what_is_allocated_follows_what_is_held() -> None:
    """Of slots that reserved the limit, 32 rollouts of log-normal lengths would take 32 x 256 x 256 bytes = 2 MiB."""
    model = small_model(max_position_embeddings=512)
    quantiles = [exp(3.81 + 0.833 * NormalDist().inv_cdf((i + 0.5) / 32)) for i in range(32)]
    limits = np.random.default_rng(0).permutation(np.clip(np.rint(quantiles), 1, 256)).astype(int).tolist()
    requests = ending_at(some_requests(prompts=4, n=8, tokens=256), limits)
    for sampler in (infinite(slots=32), infinite(kv_budget=2**17)):
        engine = make_engine(model, sampler=sampler, eos_token_ids=(VOCABULARY,))
        list(engine.generate(requests))
        stats = engine.stats()
        assert stats.kv_peak_bytes <= 1.4 * stats.details["engine/kv_held_bytes"], "blocks of 16 for a mean of 40"
    assert stats.kv_peak_bytes <= 2**17 and stats.slots >= 2 * (2**17 // sequence_bytes(requests, 256))


def test_as_many_rollouts_run_as_there_is_room_for_what_eviction_leaves() -> None:
    """However long they will be: 12 run at a time where 12 pages are, though 100 tokens of each would not fit."""
    sparsity = Streaming(**WORDS, protect_prompt=True)
    requests = some_requests(prompts=1, n=24, tokens=100)
    page = TOKEN * round_up(sparsity.capacity(100, 200), BLOCK)
    budget = sequence_bytes(requests, 1) + 12 * page
    parts: dict[str, Any] = dict(sampler=infinite(kv_budget=budget), sparsity=sparsity, eos_token_ids=(VOCABULARY,))
    _, engine, ledger = generate(requests, **parts)
    stats = engine.stats()
    assert ledger.peak == budget and stats.details["engine/rows_mean"] == 12.0
    assert stats.decode_steps == 2 * 99 and stats.details.get("engine/restarts", 0.0) == 0.0
