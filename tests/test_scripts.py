"""Every bench says what it takes and works at a small size, and what all of them share. No clock is judged."""

from __future__ import annotations

import argparse
import importlib
import json
from contextlib import ExitStack
from importlib.resources import files
from typing import Any

import arms
import common
import pytest
import rollout as bench

# What a small run of each bench gets besides --quick. The others need a commit to compare with, a control group
# (Linux, as root), or a real model and TRL.
SMALL = {"memory": (), "real": ("--parts", "floor", "train")}


@pytest.mark.study
@pytest.mark.filterwarnings("ignore:This process .*fork:DeprecationWarning")
@pytest.mark.parametrize("name", SMALL)
def test_a_bench_works_at_a_small_size_and_leaves_its_figures(name, tmp_path):
    out = tmp_path / "figures" / "out.json"
    assert importlib.import_module(name).main([*SMALL[name], "--quick", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["settings"]["quick"] is True and {"torch", "machine", "load"} <= found["environment"].keys()
    assert len(found.keys() - {"settings", "environment", "checks"}) >= 1


def test_every_arm_takes_every_turn():
    order: list[str] = []
    arms = {name: lambda name=name: order.append(name) or {"x": len(order)} for name in "abc"}
    turns = common.in_turns(arms, 3)
    assert "".join(order) == "abcbcacab"
    assert [turn["a"]["x"] for turn in turns] == [1, 6, 8]


def test_a_bound_that_is_missed_is_said_and_ends_with_1(tmp_path, capsys):
    args = argparse.Namespace(json=tmp_path / "out.json", rounds=3)
    checks = [common.Check("sorts", 2.5, most=3), common.Check("speed", 1.1, least=1.25)]
    assert common.finish(args, {"results": {}}, checks[:1]) == 0
    assert common.finish(args, {"results": {}}, checks) == 1
    assert "MISSED speed: 1.100 (wanted >= 1.25)" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(check["words"], check["holds"]) for check in found["checks"]] == [("sorts", True), ("speed", False)]


# The embedded model: 3 layers, 2 key-value heads of 24 numbers, keys and values, 4 bytes.
TINY_BYTES = 2 * 3 * 2 * 24 * 4


FOLDER = str(files("grpo_cli.model") / "tiny")
WHERE: dict[str, Any] = dict(model="tiny", folder=FOLDER, device="cpu", threads=1, repeats=1, seed=0)
CASE = arms.Case(**WHERE, n=5, prompts=1, slots=2, max_new_tokens=12, lengths="forced", cv=0.9)


# Lengths 7, 2, 3, 5, 1 of one prompt. A request's first token needs no step, so it takes one step less than its length.
# All at once: 6 steps. Rounds of two: 6, then 4, then 0. Continuous, two slots: the slots take (7) and (2, 3, 5, 1) or,
# in steps, 6 and 1 + 2 + 4 + 0 = 7.
STEPS = {"full": 6, "micro": 6 + 4 + 0, "infinite": 7, "generate": 6, "generate-slots": 6 + 4 + 0}


def ran(arm: str, times: int = 1) -> Any:
    made = arms.make_work(CASE)
    requests = [arms.with_limit(*of) for of in zip(made.requests, (7, 2, 3, 5, 1), strict=True)]
    with ExitStack() as stack:
        run = arms.ARMS[arm](CASE, arms.Work(requests, made.eos), stack)
        return [run(requests) for _ in range(times)], len(requests[0].prompt.token_ids)


@pytest.mark.study
@pytest.mark.parametrize("arm", STEPS)
def test_an_arm_makes_the_forced_lengths_in_the_steps_worked_out(arm):
    for one in ran(arm, times=2)[0]:
        assert (sorted(one.lengths), one.steps) == ([1, 2, 3, 5, 7], STEPS[arm])


@pytest.mark.study
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_makes_the_forced_lengths():
    ((one,), _) = ran("vllm")
    assert sorted(one.lengths) == [1, 2, 3, 5, 7] and one.steps >= 7


@pytest.mark.study
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


@pytest.mark.study
def test_a_run_leaves_a_table_and_json(tmp_path, capsys):
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
