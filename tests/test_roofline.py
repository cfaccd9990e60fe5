"""The least that a phase could take: worked out by hand from lengths and a model's sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from made import full, infinite

from grpo_cli.engine.kv.eviction import Dense
from grpo_cli.learner.forward import Padded, PaddingFree
from grpo_cli.profile.estimate import Passes, StepShape
from grpo_cli.profile.operations import Operations
from grpo_cli.profile.roofline import KNOWN, Floor, ModelSizes, Rates, fast_when_planned, floors, published
from grpo_cli.profile.shapes import EngineShape, Workload
from grpo_cli.settings import GpuWord
from grpo_cli.types import Prompt

# 100 weights in layers and 10 in the head, 3 numbers of a query and 3 of a value: two operations each, twice backward.
FORWARD = Operations(token=200, logits=20, pair=12)
NUMBERS = ModelSizes(
    rollout=FORWARD,
    forward=FORWARD,
    backward=Operations(token=400, logits=40, pair=24),
    token_bytes=8,
    read_bytes=1000,
    rollout_bytes=500,
    trained_bytes=400,
    optimizer_bytes=800,
)
# A prompt of 5 tokens, and replies of 3 and 2.
WORK = Workload((Prompt("a", (1, 2, 3, 4, 5), ""),), ((3, 2),), 3)
STEP = StepShape(
    rollouts=WORK,
    m=2,
    engine=EngineShape(full(), Dense(), 0),
    evaluation=None,
    forward=Padded(400, 64, 1.0),
    minibatches=1,
    passes=Passes(policy_over_all=False, policy_over_kept=False, reference=False),
)


def test_rollouts_read_weights_once_a_step_and_each_key_that_is_looked_at():
    found = floors(STEP, NUMBERS, 1)
    # 5 tokens times 100 weights and one answer of the head; attention: 2 * 3 * (5 * 6).
    assert found["prefill"] == Floor(500 + 5 * 8, 2 * (500 + 10) + 180)
    # Two steps make 2 tokens and 1. Keys: 1 + 2 and 1 of replies; 5 of the prompt, once in each step; 3 are written.
    assert found["decode"] == Floor(2 * 500 + (4 + 10 + 3) * 8, 2 * 110 * 3 + 4 * 3 * (4 + 3 * 5))
    one_slot = replace(STEP, engine=EngineShape(infinite(slots=1), Dense(), 0))
    assert floors(one_slot, NUMBERS, 1)["decode"].nbytes == found["decode"].nbytes + 500, "a step more"
    evaluated = replace(STEP, evaluation=WORK)
    assert floors(evaluated, NUMBERS, 1)["eval"] == found["prefill"] + found["decode"]


def test_an_update_multiplies_forward_and_backward_all_tokens_and_the_head_those_that_were_drawn():
    found = floors(STEP, NUMBERS, 1)
    attention = 2 * 3 * (8 * 9 + 7 * 8)  # rows of 8 and 7 tokens
    ahead = 2 * (15 * 100 + 5 * 10)  # 15 tokens, of 5 of which the logits are asked
    assert found["forward"] == Floor(1000, ahead + attention)
    assert found["backward"] == Floor(1400, 2 * ahead + 2 * attention)
    assert found["optimizer"] == Floor(3 * 400 + 2 * 800, 0)


def test_more_passes_read_the_weights_again_and_shared_prompts_go_through_once():
    found = floors(STEP, NUMBERS, 1)
    cut = floors(replace(STEP, forward=Padded(8, 64, 1.0)), NUMBERS, 1)
    assert cut["forward"] == Floor(2000, found["forward"].operations)
    twice = floors(replace(STEP, minibatches=2), NUMBERS, 3)
    assert twice["forward"] == Floor(6000, 3 * found["forward"].operations)
    assert twice["optimizer"].nbytes == 6 * found["optimizer"].nbytes
    shared = floors(replace(STEP, forward=PaddingFree(400, 64, 1.0, share=True)), NUMBERS, 1)
    assert shared["forward"].operations == found["forward"].operations - 2 * 5 * 100 - 2 * 3 * 5 * 6
    passes = Passes(policy_over_all=True, policy_over_kept=False, reference=True)
    quiet = floors(replace(STEP, m=1, passes=passes), NUMBERS, 1)
    assert quiet["policy_logprobs"] == found["forward"]
    assert quiet["ref_logprobs"] == quiet["forward"] == Floor(1000, 2 * (8 * 100 + 3 * 10) + 2 * 3 * 8 * 9)


def test_a_floor_is_what_takes_longer():
    rates = Rates(bytes_per_second=10.0, operations_per_second=100.0, source="")
    assert (Floor(50, 100).seconds(rates), Floor(50, 100).bound(rates)) == (5.0, "memory")
    assert (Floor(5, 1000).seconds(rates), Floor(5, 1000).bound(rates)) == (10.0, "products")


def test_known_gpus_are_those_that_can_be_named():
    assert set(KNOWN) == set(get_args(GpuWord))
    for gpu in KNOWN.values():
        assert gpu.float32 < (gpu.bfloat16 or 1e15) and 1e11 < gpu.bandwidth < 1e13 < gpu.memory * 1e4
    assert [fast_when_planned(word) for word in ("l4", "t4", True, False)] == [True, False, True, None]
    assert published("t4", "float32").operations_per_second == pytest.approx(8.1e12)
