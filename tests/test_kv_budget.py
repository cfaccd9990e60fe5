"""Keys and values never take more bytes than `sampler.kv_budget`, and what fits is served, with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
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

from grpo_cli.config.instantiate import ready
from grpo_cli.engine.admission import Admission, Forecast
from grpo_cli.engine.eviction import Dense
from grpo_cli.engine.kv_cache import BLOCK, KvLayout, KvPlan, PagedCache, round_up
from grpo_cli.engine.length_predictor import NoPredictor
from grpo_cli.engine.scheduling import Fifo, Lpt, Sjf
from grpo_cli.engine.sequence import Sequence
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


def generate(requests: Seq[Request], **parts: Any) -> tuple[Any, Any, Ledger]:
    """What rollouts say, the engine, and what really lay there."""
    engine, ledger = make_engine(MODEL, **{"warn": lambda text: None} | parts), Ledger()
    with ledger.open():
        made = contents(engine.generate(requests))
    return made, engine, ledger


def least_budget(requests: Seq[Request], sparsity: Any = DENSE) -> int:
    """What one sequence takes, as the engine says when it is given a byte."""
    with pytest.raises(UserError) as refused:
        generate(requests, sampler=infinite(kv_budget=1), sparsity=sparsity)
    return int(str(refused.value).partition("set at least ")[2].partition(" bytes")[0])


def sequence_bytes(requests: Seq[Request], tokens: int) -> int:
    """Return the bytes of the longest prompt and of `tokens` tokens, the last of which has no key, in whole blocks."""
    longest = max(len(request.prompt.token_ids) for request in requests)
    return TOKEN * (round_up(longest, BLOCK) + round_up(tokens - 1, BLOCK))


def ending_at(requests: Seq[Request], limits: Seq[int]) -> list[Request]:
    """The same with limits of their own, where nothing else ends them."""
    words = [replace(r.sampling, max_new_tokens=limit) for r, limit in zip(requests, limits, strict=True)]
    return [replace(r, sampling=word) for r, word in zip(requests, words, strict=True)]


SCHEDULERS = [Fifo, Sjf, Lpt, fptas, AnyOrder]
PREDICTORS = [NoPredictor, mean_length, Forgetful, lambda: prefix_head(prefix_tokens=3, min_rollouts=2)]
WORDS: dict[str, Any] = dict(budget=6, buffer=3, window=2, sinks=1, per_head=True)
STREAMING = ready("sparsity", "streaming", **WORDS, protect_prompt=True)
RKV = ready("sparsity", "rkv", **WORDS, protect_prompt=False)


@pytest.mark.bits
@settings(max_examples=20)
@given(
    make=st.sampled_from([micro, infinite]),
    chosen=st.tuples(*map(st.sampled_from, (SCHEDULERS, PREDICTORS, [DENSE, STREAMING, RKV]))),
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


def test_one_that_has_begun_continues_before_all_others_and_in_a_round_that_goes_on() -> None:
    first, second, *later = waiting = [Sequence(index, request) for index, request in enumerate(some_requests(1, 4))]
    admission = Admission(2, False)
    admission.start(Fifo(), waiting)
    assert admission.admit([]) == [first, second]
    admission.put_first(second)
    assert admission.admit([first]) == [], "it has no token"
    second.append(5, 0.0)
    assert admission.admit([first]) == [second]
    assert admission.admit([second]) == [] and admission.admit([], lambda one, _: one is later[1]) == [later[1]]
    assert admission.admit([]) == [later[0]], "which waited for room"


def test_what_sequences_hold_is_half_of_what_they_begin_and_end_with() -> None:
    """Of 4 tokens now and 10 at the end, and of 0 and 20, of which 12 are kept; and of half a block each."""
    forecast, (one, other) = Forecast(12, 8.0), [Sequence(0, request) for request in some_requests(prompts=1, n=2)]
    one.computed, one.predicted, other.predicted = 4, 8.0, 20.0
    # The mean is of 8 + 4 tokens in one rollout, and 4 + 12 / 2 is more than the 8 that were predicted.
    assert forecast.held([one, other]) == (4 + 10 + 0 + 12) / 2 + 2 * BLOCK / 2
    forecast.finish(20)
    one.predicted = other.predicted = None
    assert forecast.held([one, other]) == (4 + 12 + 0 + 12) / 2 + 2 * BLOCK / 2, "16 each"


def test_what_is_allocated_follows_what_is_held() -> None:
    """Of 32 rollouts of log-normal lengths, with a mean of 40."""
    quantiles = [exp(3.81 + 0.833 * NormalDist().inv_cdf((i + 0.5) / 32)) for i in range(32)]
    limits = np.random.default_rng(0).permutation(np.clip(np.rint(quantiles), 1, 200)).astype(int).tolist()
    requests = ending_at(some_requests(prompts=4, n=8, tokens=200), limits)
    for sampler in (infinite(slots=32), infinite(kv_budget=2**17)):
        engine = make_engine(MODEL, sampler=sampler, eos_token_ids=(VOCABULARY,))
        list(engine.generate(requests))
        assert engine.stats().kv_peak_bytes <= 1.25 * engine.stats().details["engine/kv_held_bytes"]


def test_as_many_sequences_begin_as_have_a_block_beside_a_prompt() -> None:
    """40 for 4 prompts of a block, with keys of 4 blocks each."""
    prompts, page = [Prompt(str(i), (3,) * BLOCK, "") for i in range(4)], TOKEN * BLOCK
    requests = [Request(prompts[i % 4], i, i, Sampling.plain(4 * BLOCK + 1)) for i in range(40)]
    layout = KvLayout(2, 2, 8, torch.float32)

    def plan_of(sampler: Any, sparsity: Any = DENSE) -> KvPlan:
        return KvPlan.of(layout, sampler, sparsity, requests, None, 0, pauses=False)

    for blocks, slots in ((5, 4), (6, 5), (40, 39), (41, 40), (999, 40)):
        plan = plan_of(infinite(kv_budget=page * blocks + page - 1))
        assert (plan.slots, plan.blocks) == (slots, min(blocks, 4 + 160))
    plan = plan_of(infinite(slots=3), STREAMING)
    assert (plan.blocks, plan.own_blocks) == (4 + 3 * 2, 2), "9 keys each"
    many = [Request(Prompt(str(i), (3,) * BLOCK, ""), 0, i, Sampling.plain(4 * BLOCK + 1)) for i in range(300)]
    assert KvPlan.of(layout, infinite(slots=3), DENSE, many, None, 0, pauses=False).blocks == 128 + 3 * 4
    # An evaluation runs as many at a time as a step, or 128.
    assert [full().slots_for(300, per_step) for per_step in (None, 16, 200, 512)] == [128, 128, 200, 300]


@pytest.mark.parametrize("scheduler", [Fifo, AnyOrder])
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
    assert stats.details["engine/preemptions"] > 0
    assert stats.generated_tokens == sum(limits), "what was made twice counts once"
