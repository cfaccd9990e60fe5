"""Truths of the loop that have no better home: nothing writes to its arguments, and the embedded task is learned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import made
import numpy as np
import pytest
import torch
from small import kept_by, scored, small_model
from typed import done, json_lines

from grpo_cli import metrics, select
from grpo_cli.collect.requests import group_rollouts
from grpo_cli.config.choices import choices, shipped
from grpo_cli.learner import batch
from grpo_cli.learner.forward import Padded
from grpo_cli.methods import pods
from grpo_cli.types import Batch, Reward, ScoredGroup, Verdict


def a_group() -> ScoredGroup:
    words = {"replies": [(8 + i, 9, 1) for i in range(4)], "logprobs": [(-0.5, -1.0, -0.1 * i) for i in range(4)]}
    return scored(*(Reward(float(i % 2), {"part": 1.0}) for i in range(4)), prompt=(5, 6, 7), **words)


def a_batch() -> Batch:
    made = batch.collate([a_group()])
    made = replace(made, advantages=made.per_token(torch.tensor([1.0, -1.0, 0.5, 0.0])))
    old = made.sampler_logprobs - 0.1 * made.response_mask
    return replace(made, old_logprobs=old, ref_logprobs=old.clone())


def contents(value: Any) -> Any:
    """Everything that a value says, in a form that `==` compares."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return [contents(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, list | tuple):
        return [contents(item) for item in value]
    return value


RNG = np.random.default_rng(0)
NEW = a_batch().sampler_logprobs * 1.1
CASES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    **{
        f"downsample.{name}": (partial(kept_by, made.downsample(name), keep=2, rng=RNG), [a_group()])
        for name in choices("downsample")
        if name not in ("all", "median")  # which do not keep two of four
    },
    **{
        f"advantage.{rule}": (made.advantage(rule, stats_over="kept"), [a_group(), [0, 1]])
        for rule in choices("advantage")
        if "stats_over" in shipped("advantage", rule)
    },
    **{
        f"loss.{rule}": (made.loss(rule, kl_coef=0.1), [NEW.clone(), a_batch(), batch.totals(a_batch(), 5)])
        for rule in choices("loss")
        if "aggregation" in shipped("loss", rule)
    },
    "correction": (
        made.correction(importance="token", is_threshold=1.2, rejection="veto", mask_low=0.5, mask_high=1.5),
        [a_batch(), NEW.clone()],
    ),
    "select": (
        lambda group, why: select.select(group, why, 2, pods.maxvar, made.advantage("grpo"), RNG, True),
        [a_group(), ["", "veto", "", ""]],
    ),
    "batch.rows_of": (batch.rows_of, [a_batch(), torch.tensor([0, 2])]),
    "batch.minibatches": (lambda b: batch.minibatches(b, 2, RNG), [a_batch()]),
    "batch.corrected": (batch.corrected, [a_batch(), Verdict(NEW.clone(), a_batch().response_mask, ("",) * 4, {})]),
    "group_rollouts": (group_rollouts, [[a_group().prompt], list(a_group().rollouts)]),
    "metrics.rollout_metrics": (metrics.rollout_metrics, [[a_group()]]),
    "forward.logprobs": (lambda part: Padded(99, 2, 1.0).logprobs(small_model(), part), [a_batch()]),
}


@pytest.mark.parametrize("name", CASES)
def test_no_function_writes_to_its_arguments(name):
    function, arguments = CASES[name]
    before = copy.deepcopy(contents(arguments))
    function(*arguments)
    assert contents(arguments) == before


def test_the_embedded_task_is_learned(elsewhere):
    """The default run's first 20 of 80 steps, half as many prompts: greedy accuracy from 50 % to over 80 %."""
    words = ["logger=jsonl", "train.steps=20", "train.prompts=8", "eval.every=20", "eval.problems=100", "eval.k=1"]
    done("train", *words, "hydra.run.dir=run")
    rows = json_lines(elsewhere / "run/metrics.jsonl")
    assert rows[0]["eval/accuracy"] <= 0.6
    assert rows[-1]["eval/accuracy"] >= 0.8
