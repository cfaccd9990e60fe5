"""The pieces of `scripts/bench/rollout.py`: what its arms count, and what its table makes of it. No clock is judged."""

from __future__ import annotations

import json
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import arms
import pytest
import rollout as bench

pytestmark = pytest.mark.study

# The embedded model: 3 layers, 2 key-value heads of 24 numbers, keys and values, 4 bytes.
TINY_BYTES = 2 * 3 * 2 * 24 * 4


def case(**words: Any) -> Any:
    folder = str(files("grpo_cli.model") / "tiny")
    settings = dict(model="tiny", folder=folder, device="cpu", n=5, prompts=1, slots=2, max_new_tokens=12)
    settings |= dict(lengths="forced", cv=0.9, threads=1, repeats=1, seed=0)
    return arms.Case(**(settings | words))


def work_of(lengths: list[int]) -> Any:
    """A forced work of one prompt whose requests have these lengths."""
    made = arms.make_work(case(n=len(lengths)))
    requests = [arms.with_limit(request, length) for request, length in zip(made.requests, lengths, strict=True)]
    return arms.Work(requests, made.eos)


# Lengths 7, 2, 3, 5, 1 of one prompt. A request's first token needs no step, so it takes one step less than its length.
# All at once: 6 steps. Rounds of two: 6, then 4, then 0. Continuous, two slots: the slots take (7) and (2, 3, 5, 1) or,
# in steps, 6 and 1 + 2 + 4 + 0 = 7.
STEPS = {"full": 6, "micro": 6 + 4 + 0, "infinite": 7, "generate": 6, "generate-slots": 6 + 4 + 0}


def ran(arm: str, times: int = 1) -> Any:
    work = work_of([7, 2, 3, 5, 1])
    with ExitStack() as stack:
        run = arms.ARMS[arm](case(), work, stack)
        return [run(work.requests) for _ in range(times)], len(work.requests[0].prompt.token_ids)


@pytest.mark.parametrize("arm", STEPS)
def test_an_arm_makes_the_forced_lengths_in_the_steps_worked_out(arm: str):
    for one in ran(arm, times=2)[0]:
        assert (sorted(one.lengths), one.steps) == ([1, 2, 3, 5, 7], STEPS[arm])


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_makes_the_forced_lengths():
    ((one,), _) = ran("vllm")
    assert sorted(one.lengths) == [1, 2, 3, 5, 7] and one.steps >= 7


def test_the_bytes_of_an_arm_are_its_shapes():
    held = {arm: ran(arm)[0][0].kv_bytes for arm in ("full", "infinite", "generate", "generate-slots")}
    prompt = ran("full")[1]
    # The last token made is never read, so 6 of 7 are kept; `generate` keeps every row up to the longest.
    assert held["generate"] == 5 * (prompt + 6) * TINY_BYTES
    assert held["generate-slots"] == 2 * (prompt + 6) * TINY_BYTES
    # Ours: the prompt once, in tiles of 16, and a tile per slot.
    assert prompt <= 16
    assert held["full"] == (1 + 5) * 16 * TINY_BYTES
    assert held["infinite"] == (1 + 2) * 16 * TINY_BYTES


def test_a_run_leaves_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "deep" / "out.json"
    assert bench.main([*"--quick --arms infinite --json".split(), str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["settings"]["max_new_tokens"] == [16] and found["environment"]["torch"]
    ((row,),) = (comparison["rows"] for comparison in found["comparisons"])
    assert row["case"]["slots"] == 2 and "folder" not in row["case"]
    (numbers,) = row["rounds"]
    names = {"tokens_per_second", "tokens_per_cpu_second", "steps", "kv_peak_bytes", "peak_bytes", "working_bytes"}
    assert names | {"length_mean", "length_cv", "length_max"} <= numbers.keys()
    assert numbers["peak_bytes"] > numbers["working_bytes"] >= 0
    assert "infinite 8 in 2" in capsys.readouterr().out
