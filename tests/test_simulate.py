"""The simulator's clock, its made-up lengths, and the comparison that the script prints."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from made import fptas, infinite, micro
from small import make_engine, small_model, some_requests

from grpo_cli.engine.lengths import TraceRow, kendall_tau
from grpo_cli.engine.predict import Oracle
from grpo_cli.engine.schedule import Fifo, Lpt, Sjf
from grpo_cli.engine.simulate import (
    DISTRIBUTIONS,
    SCHEDULERS,
    Outcome,
    compare,
    disturb,
    predict_trace,
    simulate,
    synthetic_trace,
)

SCRIPT = Path(__file__).parents[1] / "scripts" / "simulate_schedules.py"


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


def test_a_request_of_one_token_needs_no_step():
    ran = simulate([1, 1, 3], [None] * 3, Fifo(), slots=1)
    assert ran.admitted == ((0, 0, 0), (1, 0, 0), (2, 0, 0))
    assert ran.decode_steps == 2
    nothing = simulate([1, 1], [None] * 2, Fifo(), slots=1)
    assert (nothing.decode_steps, nothing.bound_ratio, nothing.slot_utilisation) == (0, 1.0, 1.0)


def test_probing_is_charged():
    # Two steps each, the first in pairs: 0 and 1, then 2 and 3 (which ends within its probe). Then 5, 2 and 1 remain.
    ran = simulate([8, 5, 4, 2], [6.0, 3.0, 2.0, 1.0], Lpt(), slots=2, prefix_tokens=2)
    assert [index for index, _, _ in ran.admitted] == [0, 1, 2]
    assert ran.decode_steps == 2 + 2 + 5


def test_with_a_slot_for_each_there_is_nothing_to_probe_for():
    assert simulate([8, 5], [None] * 2, Fifo(), slots=4, prefix_tokens=2).decode_steps == 7


def test_no_more_slots_are_used_than_there_are_requests():
    assert simulate([8, 5], [None] * 2, Fifo(), slots=4).slots == 2


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_made_up_lengths_are_whole_and_within_the_limit(distribution):
    rows = synthetic_trace(distribution, 2, 3, 50, 100.0, 0.8, 200, seed=1)
    assert len(rows) == 300 and all(1 <= row.length <= 200 for row in rows)
    assert rows == synthetic_trace(distribution, 2, 3, 50, 100.0, 0.8, 200, seed=1)
    assert rows != synthetic_trace(distribution, 2, 3, 50, 100.0, 0.8, 200, seed=2)


def test_lognormal_lengths_have_the_asked_mean_and_spread():
    rows = synthetic_trace("lognormal", 1, 400, 50, 200.0, 0.7, 10**6, seed=0)
    lengths = np.array([row.length for row in rows])
    assert lengths.mean() == pytest.approx(200, rel=0.05)
    assert lengths.std() / lengths.mean() == pytest.approx(0.7, rel=0.1)


def test_disturbed_lengths_rank_as_well_as_asked():
    rng = np.random.default_rng(0)
    lengths = np.random.default_rng(1).permutation(np.arange(1, 2001)).tolist()
    for tau in (0.0, 0.4, 0.8):
        assert kendall_tau(disturb(lengths, tau, rng), lengths) == pytest.approx(tau, abs=0.05)
    assert disturb(lengths, 1.0, rng) == pytest.approx(lengths)


def test_the_mean_predictor_sees_earlier_steps_only():
    steps = [[TraceRow(0, "a", 0, 10), TraceRow(0, "b", 0, 30)], [TraceRow(1, "a", 0, 99), TraceRow(1, "c", 0, 99)]]
    predicted = predict_trace("mean", steps, 0.5, 4, np.random.default_rng(0))
    assert predicted == [[None, None], [10.0, 20.0]]


def test_the_simulator_counts_what_the_engine_does():
    requests, model = some_requests(prompts=2, n=4, tokens=16), small_model()
    lengths = {(r.request.prompt.id, r.request.sample): len(r) for r in make_engine(model).generate(requests)}
    true = [lengths[request.prompt.id, request.sample] for request in requests]
    for sampler, scheduler in itertools.product([micro(slots=3), infinite(slots=3)], [Sjf, fptas]):
        engine = make_engine(model, sampler=sampler, scheduler=scheduler(), predictor=Oracle(lengths))
        assert len(list(engine.generate(requests))) == len(requests)
        ran = simulate(true, [float(length) for length in true], scheduler(), 3, rounds=not sampler.refills)
        assert engine.stats().decode_steps == ran.decode_steps
        assert engine.stats().slot_utilisation == pytest.approx(ran.slot_utilisation)


def outcomes(trace: list[TraceRow], slots: int) -> dict[tuple[str, str, str], Outcome]:
    found = compare(trace, slots, tau=0.4, prefix_tokens=4, seed=0)
    return {(outcome.sampler, outcome.predictor, outcome.scheduler): outcome for outcome in found}


def test_schedulers_that_need_lengths_are_left_out_where_there_are_none():
    found = outcomes(synthetic_trace("uniform", 2, 2, 8, 50.0, 0.7, 100, seed=0), slots=4)
    assert {name for sampler, predictor, name in found if predictor == "none"} == {"fifo"}
    assert len(found) == 2 * (1 + 3 * 5)


@pytest.mark.parametrize("distribution", ["lognormal", "uniform"])
def test_refilling_saves_a_quarter_of_the_steps_when_lengths_vary(distribution):
    trace = synthetic_trace(distribution, 3, 1, 64, 250.0, 0.8, 1024, seed=0)
    lengths = np.array([row.length for row in trace])
    assert lengths.std() / lengths.mean() >= 0.5
    found = outcomes(trace, slots=16)
    micro, infinite = found["micro", "none", "fifo"], found["infinite", "none", "fifo"]
    assert infinite.decode_steps <= 0.75 * micro.decode_steps


def test_true_lengths_are_planned_best_and_guesses_are_best_taken_longest_first():
    found = outcomes(synthetic_trace("lognormal", 3, 4, 32, 250.0, 0.8, 1024, seed=0), slots=16)
    ratios = {key[1:]: outcome.bound_ratio for key, outcome in found.items() if key[0] == "infinite"}
    assert 1.0 <= ratios["oracle", "fptas"] <= 1.005 < ratios["oracle", "lpt"]
    assert ratios["oracle", "lpt"] < ratios["prefix", "lpt"] < ratios["none", "fifo"] < ratios["prefix", "sjf"]
    assert found["infinite", "oracle", "fptas"].kendall_tau == pytest.approx(1.0)
    assert found["infinite", "none", "fifo"].kendall_tau is None


def script():
    spec = importlib.util.spec_from_file_location("simulate_schedules", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_reads_a_recorded_run_and_writes_its_figures(tmp_path, capsys):
    trace = tmp_path / "rollouts.jsonl"
    rows = [{"step": s, "prompt_id": "a", "sample": i, "length": 3 * i + s} for s in (1, 2) for i in range(8)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "figures" / "out.json"
    script().main(trace=trace, slots=2, out=out)
    figures = json.loads(out.read_text())
    assert figures["slots"] == 2
    assert {row["scheduler"] for row in figures[str(trace)]} == set(SCHEDULERS)
    printed = capsys.readouterr().out
    assert "16 rollouts, 2 slots" in printed and "infinite" in printed


def test_the_script_shows_the_quality_of_plans(tmp_path):
    row = script()._plan_quality("uniform", 32, 4, instances=2, seed=0)
    assert 1.0 <= row["bound_ratio"] <= row["bound_ratio_worst"] <= 1.02
