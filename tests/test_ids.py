"""Ids: rollouts, prefills and seeds go by them, so no two prompts are ever taken for one."""

from __future__ import annotations

from dataclasses import replace

import made
import pytest
from small import FakeEngine, contents, make_engine, small_model, some_requests

from grpo_cli.collect.epochs import Epochs
from grpo_cli.evaluate import evaluate
from grpo_cli.model.load import load_tokenizer
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.prompting import MadePrompts
from grpo_cli.types import Prompt, Request

A, B = Prompt("a", (5, 6, 7), "x"), Prompt("b", (8, 9), "y")
OTHER_A = Prompt("a", (9, 8, 4), "z")


def test_prompts_with_an_id_twice_and_one_without_tokens_are_refused_before_the_first_rollout():
    """At a run's start; and by an evaluation, also of prompts that are made when they are looked up."""
    for prompts in ([A, B, OTHER_A], (A, B, OTHER_A)):
        with pytest.raises(UserError, match=r"'a' is the id of two of the prompts to train on"):
            Epochs(prompts, per_step=1, seed=0)
    Epochs([A, B, replace(OTHER_A, id="c")], per_step=1, seed=0)
    with pytest.raises(UserError, match="'c' has no tokens"):
        Epochs([A, replace(B, id="c", token_ids=())], per_step=1, seed=0)
    task = made.task("arithmetic", load_tokenizer(made.model()))
    for some in ([A, OTHER_A], MadePrompts([B, A, A].__getitem__, 3)):
        with pytest.raises(UserError, match="'a' is the id of two"):
            evaluate(FakeEngine(), task, some, Sampling.plain(128), k=2, seed=0)


def test_the_engine_refuses_two_prompts_of_one_id_and_takes_equal_ones_for_one():
    """It keeps each prompt's keys under its id: the second was served with the tokens of the first."""
    engine = make_engine(small_model())
    with pytest.raises(UserError, match="two prompts have the id 'a'"):
        next(engine.generate([Request(prompt, 0, 7, Sampling.plain(4)) for prompt in (A, B, OTHER_A)]))
    assert engine.stats().prefill_tokens == 0, "before it serves any"
    requests = some_requests(prompts=2, n=2)
    copies = [replace(r, prompt=replace(r.prompt, token_ids=tuple(list(r.prompt.token_ids)))) for r in requests]
    assert contents(engine.generate(copies)) == contents(engine.generate(requests))
    assert engine.stats().prefill_tokens == sum(len(r.prompt.token_ids) for r in requests[::2])
