"""The pieces of `scripts/bench_rollout.py`: what its arms count, and what its table makes of it. No clock is judged."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"

# The embedded model: 3 layers, 2 key-value heads of 24 numbers, keys and values, 4 bytes.
TINY_BYTES = 2 * 3 * 2 * 24 * 4


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return _script("bench_rollout")


@pytest.fixture(scope="module")
def arms(bench: ModuleType) -> ModuleType:
    return _script("rollout_arms")


def _script(name: str) -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))


def case(arms: ModuleType, **words: Any) -> Any:
    settings = dict(
        model="tiny",
        folder=str(files("grpo_cli.model") / "tiny"),
        device="cpu",
        n=5,
        prompts=1,
        slots=2,
        max_new_tokens=12,
        lengths="forced",
        cv=0.9,
        threads=1,
        repeats=1,
        seed=0,
    )
    return arms.Case(**(settings | words))


def work_of(arms: ModuleType, lengths: list[int]) -> Any:
    """A forced work of one prompt whose requests have these lengths."""
    made = arms.make_work(case(arms, n=len(lengths)))
    requests = [arms.with_limit(request, length) for request, length in zip(made.requests, lengths, strict=True)]
    return arms.Work(requests, made.eos)


def test_forced_lengths_vary_as_asked_and_keep_to_their_range(arms: ModuleType):
    lengths = np.array(arms.forced_lengths(1000, 1024, 0.8, seed=0))
    assert lengths.min() >= 1 and lengths.max() <= 1024
    assert abs(lengths.mean() - 256) < 10
    assert abs(lengths.std() / lengths.mean() - 0.8) < 0.1
    assert sorted(arms.forced_lengths(32, 1024, 0.8, 1)) == sorted(arms.forced_lengths(32, 1024, 0.8, 2))
    assert arms.forced_lengths(32, 1024, 0.8, 1) != arms.forced_lengths(32, 1024, 0.8, 2)


def test_all_arms_are_given_the_same_requests(arms: ModuleType):
    first, second = arms.make_work(case(arms)), arms.make_work(case(arms))
    assert first == second
    assert first.forced
    natural = arms.make_work(case(arms, lengths="natural", prompts=2))
    assert natural.eos == (1,)
    assert len(natural.requests) == 10
    assert {request.sampling.max_new_tokens for request in natural.requests} == {12}


# Lengths 7, 2, 3, 5, 1 of one prompt. A request's first token needs no step, so it takes one step less than its length.
# All at once: 6 steps. Rounds of two: 6, then 4, then 0. Continuous, two slots: the slots take (7) and (2, 3, 5, 1) or,
# in steps, 6 and 1 + 2 + 4 + 0 = 7. Continuous batching of `transformers` reads prompts in the same forwards.
STEPS = {"full": 6, "micro": 6 + 4 + 0, "infinite": 7, "generate": 6, "generate-slots": 6 + 4 + 0}


@pytest.mark.parametrize("arm", ["full", "micro", "infinite", "generate", "generate-slots", "continuous"])
def test_an_arm_makes_the_forced_lengths_in_the_steps_worked_out(arms: ModuleType, arm: str):
    work = work_of(arms, [7, 2, 3, 5, 1])
    with ExitStack() as stack:
        run = arms.ARMS[arm](case(arms), work, stack)
        ran = run(work.requests)
        again = run(work.requests)
    assert sorted(ran.lengths) == sorted(again.lengths) == [1, 2, 3, 5, 7]
    assert ran.steps == again.steps
    assert ran.steps == STEPS.get(arm, 7)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_makes_the_forced_lengths(arms: ModuleType):
    work = work_of(arms, [7, 2, 3, 5, 1])
    with ExitStack() as stack:
        ran = arms.ARMS["vllm"](case(arms), work, stack)(work.requests)
    assert sorted(ran.lengths) == [1, 2, 3, 5, 7]
    assert ran.steps >= 7


def test_the_bytes_of_an_arm_are_its_shapes(arms: ModuleType):
    work = work_of(arms, [7, 2, 3, 5, 1])
    prompt = len(work.requests[0].prompt.token_ids)
    held = {}
    for arm in ("full", "infinite", "generate", "generate-slots", "continuous"):
        with ExitStack() as stack:
            held[arm] = arms.ARMS[arm](case(arms), work, stack)(work.requests).kv_bytes
    # The last token made is never read, so 6 of 7 are kept; `generate` keeps every row up to the longest.
    assert held["generate"] == 5 * (prompt + 6) * TINY_BYTES
    assert held["generate-slots"] == 2 * (prompt + 6) * TINY_BYTES
    # Ours: the prompt once, in tiles of 16, and a tile per slot.
    assert prompt <= 16
    assert held["full"] == (1 + 5) * 16 * TINY_BYTES
    assert held["infinite"] == (1 + 2) * 16 * TINY_BYTES
    # One page of 32 per request, and two that are kept for padding.
    assert held["continuous"] == (5 + 2) * 32 * TINY_BYTES


def test_prompts_of_unequal_lengths_are_padded_on_the_left(arms: ModuleType):
    assert arms.left_padded([[5, 6, 7], [8]]) == ([[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]])


def test_natural_lengths_end_with_the_models_own_token(arms: ModuleType):
    natural = case(arms, lengths="natural", max_new_tokens=64, n=4, prompts=2)
    work = arms.make_work(natural)
    for arm in ("full", "generate", "continuous"):
        with ExitStack() as stack:
            lengths = arms.ARMS[arm](natural, work, stack)(work.requests).lengths
        assert len(lengths) == 8
        assert max(lengths) < 64, f"{arm}: the embedded model ends its replies"


def measured(bench: ModuleType, **words: float) -> Any:
    zeros = dict.fromkeys(bench.Measured.__dataclass_fields__, 1)
    return bench.Measured(**(zeros | words))


def test_ratios_pair_what_was_measured_in_one_round(bench: ModuleType, arms: ModuleType):
    # Twice as fast in every round, though the machine's speed changed tenfold: the ratio of the medians would be 1.
    ours, theirs = bench.Row("infinite", case(arms)), bench.Row("micro", case(arms))
    for mine, other in ((10, 5), (200, 100), (20, 10)):
        ours.rounds.append(measured(bench, tokens_per_second=mine))
        theirs.rounds.append(measured(bench, tokens_per_second=other))
    assert ours.over(theirs, "tokens_per_second") == 2
    assert ours.median("tokens_per_second") == 20
    assert ours.over(bench.Row("generate", case(arms), reason="absent"), "tokens_per_second") is None


def test_bounds_are_checked_where_they_are_claimed_only(bench: ModuleType, arms: ModuleType):
    def rows(n: int, cv: float) -> list[Any]:
        shape = case(arms, n=n, slots=4)
        mine = measured(bench, tokens_per_second=130, steps=80, length_cv=cv)
        micro = measured(bench, tokens_per_second=100, steps=100, length_cv=cv)
        return [bench.Row("infinite", shape, [mine]), bench.Row("micro", shape, [micro])]

    found = bench.wanted_of_rollouts(rows(n=16, cv=0.5))
    assert [(check.found, check.holds) for check in found] == [(1.3, True), (0.8, False)]
    assert bench.wanted_of_rollouts(rows(n=15, cv=0.5)) == []
    assert bench.wanted_of_rollouts(rows(n=16, cv=0.4)) == []


def test_an_arm_that_fails_is_a_line_with_its_reason(
    bench: ModuleType, arms: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\necho 'RuntimeError: no room' >&2\nexit 3\n")
    stub.chmod(0o755)
    monkeypatch.setattr(bench.sys, "executable", str(stub))
    broken = bench.Row("full", case(arms))
    bench.measure_in_a_process(broken, tmp_path)
    assert broken.rounds == []
    assert broken.reason == "exit status 3: RuntimeError: no room"
    comparison = bench.Comparison("title", [broken], bench.wanted_of_rollouts)
    assert f"full: left out, {broken.reason}" in str(bench.shown(comparison).caption)


def test_a_run_leaves_a_table_and_json(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "deep" / "out.json"
    words = "--arms infinite --n 8 --max-new-tokens 16 --rounds 1 --repeats 1 --threads 1 --json"
    bench.main([*words.split(), str(out)])
    (comparison,) = json.loads(out.read_text())["comparisons"]
    (row,) = comparison["rows"]
    assert row["case"]["slots"] == 2
    (numbers,) = row["rounds"]
    assert set(numbers) == set(asdict(measured(bench)))
    assert numbers["peak_bytes"] > numbers["working_bytes"] >= 0
    assert "infinite" in capsys.readouterr().out
