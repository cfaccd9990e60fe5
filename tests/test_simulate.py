"""The simulator's clock (simulation.py), worked out by hand and against the engine."""

from __future__ import annotations

import itertools

import pytest
from made import fptas, infinite, micro
from simulation import simulate
from small import make_engine, small_model, some_requests

from grpo_cli.engine.length_predictor import GivenLengths, key_of
from grpo_cli.engine.scheduling import Fifo, Sjf


def test_a_request_holds_its_slot_for_one_step_less_than_it_has_tokens():
    # Slot 0: 4 steps, then 2. Slot 1: 1 step, then 3, then (at 4, when request 0 ends too, but after it by slot) none.
    ran = simulate([5, 2, 4, 3], [None] * 4, Fifo(), slots=2)
    assert ran.admitted == ((0, 0, 0), (1, 1, 0), (2, 1, 1), (3, 0, 4))
    assert ran.decode_steps == 6
    assert ran.lower_bound == 5  # 4 + 1 + 3 + 2 steps on two slots
    assert ran.slot_utilisation == 10 / 12
    assert ran.bound_ratio == 6 / 5


def test_rounds_wait_for_their_longest():
    ran = simulate([5, 2, 4, 3], [None] * 4, Fifo(), slots=2, rounds=True)
    assert ran.admitted == ((0, 0, 0), (1, 1, 0), (2, 0, 4), (3, 1, 4))
    assert ran.decode_steps == 4 + 3


def test_the_simulator_counts_what_the_engine_does():
    requests, model = some_requests(prompts=2, n=4, tokens=16), small_model()
    lengths = {(r.request.prompt.id, r.request.sample): len(r) for r in make_engine(model).generate(requests)}
    true = [lengths[request.prompt.id, request.sample] for request in requests]
    given = {key_of(request): float(length) for request, length in zip(requests, true, strict=True)}
    for sampler, scheduler in itertools.product([micro(slots=3), infinite(slots=3)], [Sjf, fptas]):
        engine = make_engine(model, sampler=sampler, scheduler=scheduler(), predictor=GivenLengths(given))
        assert len(list(engine.generate(requests))) == len(requests)
        ran = simulate(true, [float(length) for length in true], scheduler(), 3, rounds=not sampler.refills)
        assert engine.stats().decode_steps == ran.decode_steps
        assert engine.stats().slot_utilisation == pytest.approx(ran.slot_utilisation)
