"""Every bench says what it takes and works at a small size, and what all of them share. No clock is judged."""

from __future__ import annotations

import importlib
import json
from contextlib import ExitStack
from importlib.resources import files
from typing import Any

import arms
import pytest

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
