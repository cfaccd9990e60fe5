"""Advantages of single tokens, weights of problems, groups that are stored or read, and replies that begin with tokens
that are given: by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from bank import InOrder, Scripted, collection_of
from small import scored
from test_collectors import problems

from grpo_cli.config.instantiate import make
from grpo_cli.experimental.given import num_given
from grpo_cli.interfaces import Runtime
from grpo_cli.rules.advantage import advantages
from grpo_cli.settings import Sampling
from grpo_cli.types import GIVEN, Finish, Prompt, Request, Rollout, Span

HALF = math.sqrt(0.5)  # the advantage of the better of two, but for eps
TWO = scored(1.0, 0.0, replies=[(1, 2, 3), (4, 5)], logprobs=[(-0.1, -0.2, -3.0), (-0.5, -0.5)])


def runtime(task: Any) -> Runtime:
    return Runtime(torch.device("cpu"), None, None, 0, task, Scripted(), (9,))


def test_only_tokens_of_the_newest_weights_and_given_ones_are_trained_on() -> None:
    spans = (Span(GIVEN, 1), Span(3, 1), Span(4, 1)), (Span(3, 2),)
    rollouts = tuple(replace(one, spans=of) for one, of in zip(TWO.rollouts, spans, strict=True))
    found = advantages(made.advantage("fresh"), replace(TWO, rollouts=rollouts), [0, 1])
    assert found.numpy() == pytest.approx(np.array([[HALF, 0, HALF], [0, 0, 0]]), abs=5e-4)


# Groups of other steps


def test_stored_groups_take_the_place_of_new_ones_and_cost_nothing() -> None:
    """Half of four problems are new. Of p0 to p3, p3 is solved by none and not stored; then p4 and p5 beside two of
    p0, p1 and p2."""
    engine, order = Scripted(lambda r: r.sample == 0 and r.prompt.id != "p3"), OnceInOrder(problems(20))
    rule = make("collector", made.part("collector", "fifo", capacity=4))
    collection_of(engine, order, n=2, prompts=4).run(rule)
    collection = collection_of(engine, order, n=2, prompts=4, step=1, version=1)
    groups = collection.run(rule)
    names = [group.prompt.id for group in groups]
    assert names[:2] == ["p4", "p5"] and len(set(names)) == 4 and set(names[2:]) < {"p0", "p1", "p2"}
    assert [len(requests) for requests in engine.rounds] == [8, 4] and len(engine.judged) == 12
    assert [group.prompt.id for group in collection.finished_groups] == ["p4", "p5"]
    assert [one["prompt"][0] for one in rule.state_dict()["stored"]] == ["p1", "p2", "p4", "p5"], "the newest four"


class OnceInOrder(InOrder):
    """No problem comes twice."""

    def pick(self, step: int, count: int, without: Any) -> Any:
        found, self._prompts = self._prompts[:count], self._prompts[count:]
        return found


class Known(Scripted):
    """Two problems, whose tokens read as their numbers."""

    def prompts(self, split: str) -> list[Prompt]:
        return problems(2)

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


def test_groups_of_another_run_are_trained_on_with_its_log_probabilities(tmp_path: Path) -> None:
    base = {"step": 1, "prompt_id": "p0", "prompt": "0", "reply": "5 9", "finish": "eos", "parts": {}}
    base |= {"token_ids": [5, 9], "logprobs": [None, -0.5]}
    rows = [json.dumps({**base, "sample": place, "reward": float(place)}) for place in (0, 1)]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(rows) + "\n")
    rule = make("collector", made.part("collector", "folder", path=str(tmp_path)))
    rule.setup(runtime(Known()))
    engine = Scripted()
    collection = collection_of(engine, InOrder(problems(9)[1:]), n=2, prompts=2, sampling=Sampling.plain(8))
    new, read = collection.run(rule)
    assert (new.prompt.id, read.prompt.id, read.totals.tolist()) == ("p1", "p0", [0.0, 1.0])
    assert read.rollouts[1].token_ids == (5, 9) and read.rollouts[1].spans == (Span(GIVEN, 1), Span(0, 1))
    assert math.isnan(read.rollouts[0].sampler_logprobs[0]) and read.rollouts[0].sampler_logprobs[1] == -0.5
    assert [group.prompt.id for group in collection.finished_groups] == ["p1"]


# Tokens that are given


class Solving(Known):
    def solution(self, prompt: Prompt) -> Sequence[int]:
        return range(1, 11)


class Going(Scripted):
    """Replies of three more tokens; sample 0 of p0 is right, and so is what begins with tokens."""

    def generate(self, requests: Sequence[Request]) -> Any:
        self.rounds.append(list(requests))
        for request in requests:
            yield Rollout(request, (7, 7, 9), (-1.0,) * 3, Finish.EOS)


def test_the_harder_a_problem_is_the_more_of_its_solution_is_given() -> None:
    """Of two plain replies each, one to p0 is right and none to p1: 0.4 and 0.8 of 10 tokens for the other two."""
    rule = make("collector", made.part("collector", "hint", noise=0.0))
    rule.setup(runtime(Solving()))
    engine = Going(lambda r: r.prompt.id == "p0" and r.sample == 0)
    groups = collection_of(engine, InOrder(problems(2)), n=4, prompts=2, sampling=Sampling.plain(30)).run(rule)
    assert [[num_given(one) for one in group.rollouts] for group in groups] == [[0, 0, 4, 4], [0, 0, 8, 8]]
    assert groups[0].rollouts[2].token_ids == (1, 2, 3, 4, 7, 7, 9)
    assert len({one.request.seed for group in groups for one in group.rollouts}) == 8
    # rewards of p0: 1 0 plain, 0 0 with a hint; then one of those with a hint is right
    arms = made.advantage("arms")
    assert advantages(arms, groups[0], [0, 2]).tolist() == [[0.5] * 3 + [0] * 4, [0.0] * 7]
    right = replace(groups[0], rewards=(groups[0].rewards[1],) * 2 + groups[0].rewards[:2])
    assert advantages(arms, right, [2, 3]).tolist() == [[0.5] * 7, [0] * 4 + [-0.5] * 3]
