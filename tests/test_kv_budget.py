"""Keys and values never take more bytes than `sampler.kv_budget`, and what fits is served, with the same tokens."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made import fptas, full, infinite, mean_length, micro, prefix_head
from small import VOCABULARY, contents, make_engine, small_model, some_requests
from test_engine import Backwards, Forgetful

from grpo_cli.engine.cache import KvLayout, KvStore, PromptPool
from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.eviction import Dense, Rkv, Streaming
from grpo_cli.engine.interfaces import Plan, Running, Waiting
from grpo_cli.engine.invariance import invariance_of
from grpo_cli.engine.padding import round_up
from grpo_cli.engine.predict import NoPredictor
from grpo_cli.engine.sampler import KvShape
from grpo_cli.engine.schedule import Fifo, Lpt, Sjf
from grpo_cli.engine.sequence import Parked
from grpo_cli.errors import UserError
from grpo_cli.types import Request

TOKEN = 256  # bytes of small_model: 2 layers x keys and values x 2 heads x 8 numbers of 4
MODEL = small_model()
PADDING = invariance_of(Decoder(MODEL)).padding  # found before anything is counted


class AnyOrder(Backwards):
    """Whom it likes, into whichever slot, and not always as many as it might; relies on its plans being followed."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._left: set[int] = set()

    def start(self, waiting: Sequence[Waiting], slots: int) -> None:
        self._left = {view.index for view in waiting}

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free_slots: Sequence[int]) -> Plan:
        assert {view.index for view in waiting} == self._left
        assert not self._left & {view.index for view in running}
        some = min(len(waiting), self._random.randint(0 if running else 1, len(free_slots)))
        indices, slots = self._random.sample(sorted(self._left), some), self._random.sample(list(free_slots), some)
        self._left -= set(indices)
        return Plan(tuple(zip(indices, slots, strict=True)))


class PromptsFirst(Backwards):
    """One rollout of every prompt before another one of any: opens as many prompts as it can."""

    def start(self, waiting: Sequence[Waiting], slots: int) -> None:
        names = [view.prompt_id for view in waiting]
        self._rank = {view.index: names[:place].count(view.prompt_id) for place, view in enumerate(waiting)}

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free_slots: Sequence[int]) -> Plan:
        order = sorted(waiting, key=lambda view: (self._rank[view.index], view.index))
        return Plan(tuple((w.index, slot) for w, slot in zip(order, free_slots, strict=False)))


class Ledger:
    """Most bytes of keys and values that were alive at a time, whoever held them; asks the engine nothing."""

    def __init__(self) -> None:
        self.peak = 0
        self._alive: list[weakref.ref[Any]] = []

    def add(self, block: KvStore | Parked) -> None:
        self._alive.append(weakref.ref(block))
        held = [block for one in self._alive if (block := one()) is not None]
        self.peak = max(self.peak, sum(block.keys.nbytes + block.values.nbytes for block in held))

    @contextmanager
    def open(self) -> Iterator[None]:
        init, post_init = KvStore.__init__, Parked.__init__

        def store(block: KvStore, *given: Any) -> None:
            init(block, *given)
            self.add(block)

        def parked(block: Parked, *given: Any) -> None:
            post_init(block, *given)
            self.add(block)

        with patch.object(KvStore, "__init__", store), patch.object(Parked, "__init__", parked):
            yield


def generate(requests: Sequence[Request], **parts: Any) -> tuple[Any, Any, Ledger]:
    """What rollouts say, the engine, and what really lay there."""
    engine, ledger = make_engine(MODEL, **{"warn": lambda text: None} | parts), Ledger()
    with ledger.open():
        made = contents(engine.generate(requests))
    return made, engine, ledger


def prompt_bytes(requests: Sequence[Request]) -> int:
    """Of each entry, which has room for the longest prompt in whole tiles."""
    return TOKEN * round_up(max(len(r.prompt.token_ids) for r in requests), PADDING.prompt_tile)


def slot_bytes(tokens: int) -> int:
    return TOKEN * round_up(tokens - 1, PADDING.slot_tile)


SCHEDULERS = [Fifo, Sjf, Lpt, fptas, lambda: fptas(refill="lpt"), Backwards, PromptsFirst, AnyOrder]
PREDICTORS = [NoPredictor, mean_length, Forgetful, lambda: prefix_head(prefix_tokens=3, min_rollouts=2)]
WORDS: dict[str, Any] = dict(budget=6, buffer=3, window=2, sinks=1, per_head=True)
SPARSITIES = [
    Dense(),
    Streaming(**WORDS, protect_prompt=True),
    Rkv(**WORDS, protect_prompt=False, kernel=3, importance=0.3, threshold=0.5),
]


@pytest.mark.bits
@settings(max_examples=40)
@given(
    make=st.sampled_from([micro, infinite]),
    scheduler=st.sampled_from(SCHEDULERS),
    predictor=st.sampled_from(PREDICTORS),
    sparsity=st.sampled_from(SPARSITIES),
    slots=st.none() | st.integers(1, 6),
    prompts=st.integers(1, 6),
    n=st.integers(1, 4),
    tokens=st.integers(1, 20),
    seed=st.integers(0, 99),
    share=st.floats(0, 1.2),
)
def test_no_order_of_rollouts_ever_holds_more_than_the_budget_or_changes_one(
    make: Any,
    scheduler: Any,
    predictor: Any,
    sparsity: Any,
    slots: Any,
    prompts: Any,
    n: Any,
    tokens: Any,
    seed: Any,
    share: float,
) -> None:
    requests = some_requests(prompts=prompts, n=n, tokens=tokens, seed=seed)
    full = make_engine(MODEL, sparsity=sparsity)
    rollouts = list(full.generate(requests))
    least = (full.stats().kv_peak_bytes - prompts * prompt_bytes(requests)) // len(requests) + prompt_bytes(requests)
    budget = least + int(share * (full.stats().kv_peak_bytes - least))
    parts: dict[str, Any] = dict(sampler=make(slots=slots, kv_budget=budget), scheduler=scheduler())
    parts |= dict(predictor=predictor(), sparsity=sparsity)
    parts["predictor"].learn(rollouts, torch.zeros(len(requests), 32))
    made, engine, ledger = generate(requests, **parts)
    assert made == contents(rollouts)
    assert engine.stats().kv_peak_bytes == ledger.peak <= budget


@pytest.mark.parametrize("scheduler", [Fifo, Lpt, PromptsFirst])
@pytest.mark.parametrize("predictor", [NoPredictor, Forgetful])
@pytest.mark.parametrize("sampler", [full(), micro(slots=2), infinite(slots=3)], ids=str)
def test_the_peak_without_a_budget_is_what_lay_there_too(scheduler: Any, predictor: Any, sampler: Any) -> None:
    """A pool that grows, and rollouts that wait with their keys, were once left out in part."""
    requests = some_requests(prompts=7, n=3, tokens=24)
    _, engine, ledger = generate(requests, sampler=sampler, scheduler=scheduler(), predictor=predictor())
    assert engine.stats().kv_peak_bytes == ledger.peak


def test_while_the_pool_grows_old_and_new_lie_side_by_side() -> None:
    requests = some_requests(prompts=3, n=2, tokens=17)
    _, engine, _ = generate(requests, sampler=infinite(slots=1), scheduler=PromptsFirst())
    # From one entry to two, and then to three while two are there.
    assert engine.stats().kv_peak_bytes == slot_bytes(17) + (2 + 3) * prompt_bytes(requests)


def test_who_waits_after_a_prefix_waits_with_its_keys_and_all_prompts() -> None:
    requests = some_requests(prompts=3, n=2, tokens=17)
    parts: dict[str, Any] = dict(eos_token_ids=(VOCABULARY,), scheduler=Lpt(), predictor=Forgetful())
    _, engine, _ = generate(requests, sampler=infinite(slots=2), **parts)
    # Nobody ends within three tokens, the last of which has no key yet: at the end of the round all six wait.
    assert engine.stats().kv_peak_bytes == 2 * slot_bytes(17) + 3 * prompt_bytes(requests) + 6 * 2 * TOKEN


@pytest.mark.bits
def test_an_evaluation_of_many_prompts_needs_no_room_for_them_all() -> None:
    """200 prompts, once refused where their keys together were more than the budget."""
    requests = some_requests(prompts=200, n=1, tokens=3, temperature=0.0)
    budget = 3 * (slot_bytes(3) + prompt_bytes(requests))
    for make in (micro, infinite):
        made, engine, ledger = generate(
            requests, sampler=make(kv_budget=budget), scheduler=Lpt(), predictor=Forgetful()
        )
        assert made == contents(make_engine(MODEL, sampler=infinite(slots=9)).generate(requests))
        assert engine.stats().slots == 3 and ledger.peak == budget


@pytest.mark.bits
@pytest.mark.parametrize("make", [micro, infinite])
@pytest.mark.parametrize("parts", [{}, {"scheduler": PromptsFirst()}, {"scheduler": Sjf(), "predictor": Forgetful()}])
def test_room_for_one_sequence_serves_them_all_and_a_byte_less_none(make: Any, parts: Any) -> None:
    requests = some_requests(prompts=3, n=3, tokens=20)
    least = slot_bytes(20) + prompt_bytes(requests)
    with pytest.raises(UserError, match=rf"holds not even one sequence; the least that would do is {least} bytes"):
        generate(requests, sampler=make(kv_budget=least - 1), **parts)
    made, engine, ledger = generate(requests, sampler=make(kv_budget=least), **parts)
    assert made == contents(make_engine(MODEL).generate(requests))
    assert engine.stats().slots == 1 and ledger.peak == least


def test_as_many_slots_as_fit_with_the_prompts_that_run_in_them() -> None:
    shape = KvShape(requests=40, prompts=4, prompt_bytes=10, slot_bytes=100)
    slots = [infinite(kv_budget=budget).fit(shape).slots for budget in (110, 219, 220, 440, 539, 540, 639, 640, 10**6)]
    assert slots == [1, 1, 2, 4, 4, 5, 5, 6, 40]
    assert infinite(kv_budget=10**6).fit(shape, most=7).slots == 7
    assert infinite(kv_budget=10**6, slots=3).fit(shape, most=7).slots == 3


def test_a_prefix_of_everybody_may_cost_half_of_the_slots_and_no_more() -> None:
    """6 prompts of 10 bytes and 12 rollouts that wait with 20 take 300 bytes, with 2 slots of 100 they take 500; as
    much holds 4 slots with a prompt each (440) and not 5 (550). With 499, one slot would be left of 4."""
    shape = KvShape(requests=12, prompts=6, prompt_bytes=10, slot_bytes=100, parked_bytes=20)
    rooms = [infinite(kv_budget=budget).fit(shape) for budget in (499, 500, 10**6)]
    assert [(room.slots, room.probes, room.probes_with) for room in rooms] == [
        (4, False, 500),
        (2, True, 0),
        (12, False, 0),
    ]
    # With no more than 2 slots at any rate, one of them is half.
    rooms = [infinite(kv_budget=budget, slots=2).fit(shape) for budget in (399, 400, 500)]
    assert [(room.slots, room.probes, room.probes_with) for room in rooms] == [
        (2, False, 400),
        (1, True, 0),
        (2, True, 0),
    ]
    for sampler in (full(), infinite(slots=12), infinite(slots=3)):
        room = sampler.fit(shape)
        assert (room.bounded, room.probes) == (False, room.slots == 3)


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
    assert "12 rollouts of 3 prompts that wait after 2 tokens each" in text
    enough = int(text.partition(" bytes, or")[0].rpartition(" ")[2])
    for given_bytes, probes in ((enough - 1, False), (enough, True)):
        made, engine, ledger = generate(requests, sampler=infinite(kv_budget=given_bytes), **parts)
        assert made == wanted and ledger.peak <= given_bytes
        assert ("engine/probe_steps" in engine.stats().details) == probes
    assert len(said) == 2, "one of each engine that has no room"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_no_slot_is_empty_while_somebody_waits_however_few_prompts_are_held(scheduler: Any) -> None:
    requests = some_requests(prompts=6, n=4, tokens=20)
    budget = 3 * (slot_bytes(20) + prompt_bytes(requests))
    engine = make_engine(MODEL, sampler=infinite(kv_budget=budget), scheduler=scheduler())
    steps = sum(len(rollout) - 1 for rollout in engine.generate(requests))
    stats = engine.stats()
    assert stats.slots == 3
    if scheduler is not AnyOrder:  # who leaves slots empty of its own accord
        assert stats.decode_steps <= (steps + 2 * 19) / 3, "Graham's bound, 19 being the longest"


def test_prompts_that_are_held_are_those_that_somebody_needs() -> None:
    """Two prompts at a time: the third is opened when the last rollout of one has ended."""
    held: list[int] = []

    class Watching(PromptsFirst):
        def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free_slots: Sequence[int]) -> Plan:
            plan = super().plan(waiting, running, free_slots)
            held.append(len({r.index // 3 for r in running}))
            return plan

    requests = some_requests(prompts=4, n=3, tokens=20)
    budget = 2 * (slot_bytes(20) + prompt_bytes(requests))
    _, engine, ledger = generate(requests, sampler=infinite(kv_budget=budget), scheduler=Watching())
    assert max(held) <= 2 and ledger.peak == budget
    assert engine.stats().prefill_tokens == sum(len(r.prompt.token_ids) for r in requests[::3]), "each once"


def test_a_pool_says_how_many_prompts_it_can_still_take() -> None:
    pool = PromptPool(KvLayout(1, 1, 8, torch.float32), 1, 3, 16, 5, torch.device("cpu"))
    keys, left = torch.ones(1, 1, 1, 16, 8), [pool.left]
    for _ in range(3):
        entry = pool.claim()
        pool.put([entry], keys, keys, torch.zeros(1, 5), [9])
        left.append(pool.left)
    pool.release(0)
    assert [*left, pool.left] == [3, 2, 1, 0, 1]
    assert pool.take_peak() == (2 + 3) * 1024 and pool.take_peak() == 3 * 1024
