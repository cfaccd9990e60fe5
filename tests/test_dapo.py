"""DAPO (arXiv 2503.14476): the paper's recipe worked by hand, rounds until enough groups teach, replies cut off."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from bank import InOrder, Scripted, collection_of
from small import plain_batch, scored
from test_resume import records, rows, trained
from test_train import make_trainer, settings_for
from tiny_hf import make_tokenizer
from words import rollout_of as reply_of
from words import task_of

from grpo_cli.collect.epochs import Epochs
from grpo_cli.collect.equal import equal
from grpo_cli.config.check import check
from grpo_cli.config.compose import settings_of
from grpo_cli.methods import pods
from grpo_cli.methods.dapo import Dynamic
from grpo_cli.runs.checkpoint import load_state
from grpo_cli.select import CUT_OFF
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.formats import overlong
from grpo_cli.tracking.examples import NOT_TAKEN
from grpo_cli.types import ENVIRONMENT, Finish, Prompt, Request, Reward, Rollout, Span, Totals


def dynamic(*, surplus: float = 0.0, most_rounds: int = 10) -> Dynamic:
    return Dynamic(surplus=surplus, most_rounds=most_rounds)


# The paper's recipe by hand


class Table(Scripted):
    """A policy that is a table: of each problem, the replies of its samples as (tokens, right). Length counts from the
    last 4 tokens on."""

    def __init__(self, table: dict[str, Sequence[tuple[int, bool]]]) -> None:
        super().__init__()
        self.table = table

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        self.rounds.append(list(requests))
        for request in requests:
            tokens, _ = self.table[request.prompt.id][request.sample]
            finish = Finish.EOS if tokens < request.sampling.max_new_tokens else Finish.LENGTH
            yield Rollout(request, (3,) * tokens, (-1.0,) * tokens, finish, 0)

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        right = float(self.table[prompt.id][rollout.request.sample][1])
        length = overlong(rollout, 4)
        return Reward(right + length, {"correct": right, "overlong": length})


@pytest.mark.parametrize(
    ("rewards", "teaches"),
    [
        ([{"correct": 1.0}, {"correct": 1.0, "overlong": -0.5}], False),
        ([{"correct": 0.0, "format": 0.1}, {"correct": 0.0}], False),
        ([{"correct": 0.0, "format": 0.5}, {"correct": 1.0}], True),
        ([{"correct": 0.3}, {"correct": 0.2, "format": 0.1}], True),
        ([{"style": 1.0}, {"style": 0.0}], True),  # an own reward without a grade
        ([{}, {}], False),
    ],
)
@pytest.mark.parametrize("weighed", [False, True])
def test_groups_are_dropped_by_their_answers_and_not_by_penalties(
    rewards: list[dict[str, float]], teaches: bool, weighed: bool
) -> None:
    weights = {name: 1.0 for parts in rewards for name in parts} if weighed else {}
    group = scored(*(Reward(sum(parts.values(), 0.0), parts, weights=weights) for parts in rewards))
    step = collection_of(Table({}), InOrder([]), n=2, prompts=1)
    assert step.differs(group) == teaches
    logged = [Reward(length, {"correct": 1.0, "length": length}, weights={"length": 1.0}) for length in (0.2, 0.8)]
    assert step.differs(scored(*logged)), "an answer that is only logged drops no group"


def test_the_papers_whole_recipe_worked_by_hand() -> None:
    """L = 10 with c = 4, two rollouts each of two problems a step. p0 is solved by both and dropped, p1, p2 are mixed.

    Rewards of p1: right, 6 tokens: 1 + 0 = 1. Wrong, 8 tokens: 0 + (10 - 4 - 8) / 4 = -1/2. Of p2: right, cut off at
    10: 1 - 1 = 0. Wrong, 10: -1. Advantages of two are 1 / sqrt(2) and its negative: half of the difference, divided
    by the deviation of a sample.
    """
    table = {"p0": [(2, True)] * 2, "p1": [(6, True), (8, False)], "p2": [(10, True), (10, False)]}
    engine = Table(table)

    order = InOrder([Prompt(f"p{i}", (0,), "") for i in range(3)])
    collection = collection_of(engine, order, n=2, prompts=2, sampling=Sampling.plain(10))
    groups = collection.run(dynamic())
    assert [len(asked) for asked in engine.rounds] == [4, 2], "two problems, then the one that is lacking"
    assert [(group.prompt.id, group.totals.tolist()) for group in groups] == [("p1", [1.0, -0.5]), ("p2", [0.0, -1.0])]
    assert collection.metrics()["collect/dropped_groups"] == 1 and collection.metrics()["collect/tokens_dropped"] == 4

    grpo = made.advantage("grpo")
    advantages = torch.cat([grpo(group, [0, 1]) for group in groups]).float()
    half = math.sqrt(0.5)
    assert advantages.tolist() == pytest.approx([half, -half, half, -half], abs=1e-3)

    # The loss: a mean over all 6 + 8 + 10 + 10 = 34 tokens, the ratio of every token 1.27, 0.9, 1.5, 0.7 row by row,
    # clipped at 1 - 0.2 and 1 + 0.28: 6 * 1.27 (inside) - 8 * 0.9 (inside) + 10 * 1.28 (clipped) - 10 * max(0.7, 0.8).
    lengths, ratios = [6, 8, 10, 10], [1.27, 0.9, 1.5, 0.7]
    mask = torch.tensor([[place < length for place in range(10)] for length in lengths])
    logprobs = torch.tensor(ratios).log()[:, None].expand(4, 10)
    batch = plain_batch(mask, advantages=advantages, policy_logprobs=torch.zeros(4, 10))
    output = made.loss("dapo")(logprobs[mask], batch, Totals(4, 34, 10))
    assert float(output.loss) == pytest.approx(-half * (6 * 1.27 - 8 * 0.9 + 10 * 1.28 - 10 * 0.8) / 34, abs=1e-3)


@pytest.mark.parametrize(
    ("tokens", "longest", "within", "part"),
    [
        (0, 20, 4, 0.0),
        (16, 20, 4, 0.0),  # L - c
        (17, 20, 4, -0.25),
        (19, 20, 4, -0.75),
        (20, 20, 4, -1.0),  # cut off, or just in time
        (16384, 20480, None, 0.0),  # as published: 16,384 are expected, and 4,096 are the cache
        (18432, 20480, None, -0.5),
        (20480, 20480, None, -1.0),
        (3, 3, 3, -1.0),
        (1, 3, 3, -1 / 3),
        (3, 3, None, -1.0),  # a fifth of 3 is one token, and no division by none
        (2, 3, None, 0.0),
    ],
)
def test_long_replies_are_punished_in_a_straight_line(tokens: int, longest: int, within: int | None, part: float):
    request = Request(Prompt("p", (1,), ""), 0, 0, Sampling.plain(longest))
    rollout = Rollout(request, (2,) * tokens, (-1.0,) * tokens, Finish.EOS, 0)
    assert overlong(rollout, within) == pytest.approx(part)
    episode = replace(rollout, spans=(Span(0, tokens - 1), Span(ENVIRONMENT, 1))) if tokens else rollout
    assert overlong(episode, within) == pytest.approx(part), "what the environment said counts, as in the limit"


@pytest.mark.parametrize("formats_on", ["all", "wrong"])
def test_a_task_of_text_weighs_length_and_names_it(tmp_path: Path, formats_on: str) -> None:
    tokenizer, path = make_tokenizer(), tmp_path / "p.jsonl"
    path.write_text('{"question": "a", "answer": "4"}\n{"question": "b", "answer": "4"}\n')
    words: dict[str, Any] = dict(path=str(path), overlong_tokens=1, formats_on=formats_on)
    task = task_of("jsonl", tokenizer, **words, weights={"correct": 1.0, "overlong": 0.5})
    prompt = task.prompts("train")[0]
    rollout = reply_of(prompt, "4", tokenizer)
    rollout = replace(rollout, request=replace(rollout.request, sampling=Sampling.plain(len(rollout))))
    reward = task.reward(prompt, rollout)
    assert (reward.total, reward.parts["overlong"], reward.weights["overlong"]) == (0.5, -1.0, 0.5)
    plain = task_of("jsonl", tokenizer, **words).reward(prompt, rollout)
    assert plain.total == 1.0 and "overlong" not in plain.parts


# Rounds


class Chance(Scripted):
    """Each group is mixed with a chance p, drawn by its problem; else all are right."""

    def __init__(self, p: float) -> None:
        super().__init__(lambda request: not (request.prompt.token_ids[0] < 1000 * p and request.sample == 0))


def some_problems(count: int, seed: int) -> list[Prompt]:
    numbers = np.random.default_rng(seed).integers(0, 1000, count).tolist()
    return [Prompt(f"p{place}", (number,), "") for place, number in enumerate(numbers)]


@pytest.mark.parametrize("surplus", [0.0, 0.3, 2.0])
def test_every_group_that_is_kept_is_mixed_and_none_comes_twice(surplus: float) -> None:
    rule, order = dynamic(surplus=surplus, most_rounds=99), Epochs(some_problems(4000, 1), 5, 0)
    seen = list[str]()
    for step in range(12):
        collection = collection_of(Chance(0.3), order, n=3, prompts=5, step=step, version=step)
        groups = collection.run(rule)
        assert len(groups) == 5 and all(0 < group.totals.sum() < 3 for group in groups)
        metrics = collection.metrics()
        assert metrics["collect/problems"] == len(collection.finished_groups) == 5 + metrics["collect/dropped_groups"]
        assert metrics["collect/tokens_dropped"] == 3 * metrics["collect/dropped_groups"]
        seen += [group.prompt.id for group in groups]
    assert len(seen) == len(set(seen)) == 60


def test_a_round_generates_what_is_lacking_and_a_surplus() -> None:
    engine = Scripted(lambda request: request.sample == 0 and request.prompt.id not in ("p0", "p1", "p2"))
    collection = collection_of(engine, InOrder([Prompt(f"p{i}", (0,), "") for i in range(40)]), n=2, prompts=4)
    groups = collection.run(dynamic(surplus=0.5))
    rounds = [[request.prompt.id for request in requests[::2]] for requests in engine.rounds]
    assert rounds == [[f"p{i}" for i in range(6)], ["p6", "p7"]]
    assert [group.prompt.id for group in groups] == ["p3", "p4", "p5", "p6"]


def test_a_step_without_a_mixed_group_is_a_plain_one_that_teaches_nothing() -> None:
    engine = Scripted()
    order = InOrder([Prompt(f"p{i}", (0,), "") for i in range(40)])
    collection = collection_of(engine, order, n=2, prompts=3)
    groups = collection.run(dynamic(most_rounds=4))
    few = [Prompt(f"p{i}", (0,), "") for i in range(5)]
    one = Scripted(lambda request: request.prompt.id == "p1" and request.sample == 0)
    ended = collection_of(one, InOrder(few), n=2, prompts=3, problems=5).run(dynamic())
    assert [group.prompt.id for group in ended] == ["p1"] and len(one.rounds) == 2, "there are no more problems"
    assert [group.prompt.id for group in groups] == ["p0", "p1", "p2"] and len(engine.rounds) == 4
    assert collection.metrics()["collect/dropped_groups"] == 9 and len(collection.finished_groups) == 12


def test_where_all_groups_are_mixed_a_step_is_a_plain_one() -> None:
    order = [Prompt(f"p{i}", (0,), "") for i in range(40)]
    plain, found = (
        collection_of(Scripted(lambda request: request.sample == 0), InOrder(order), n=3, prompts=4).run(rule)
        for rule in (equal, dynamic())
    )
    assert found == plain and len(found) == 4


def test_no_round_is_begun_once_the_run_has_its_tokens() -> None:
    def run(tokens_left: float) -> tuple[int, list[str]]:
        engine = Scripted(lambda request: request.prompt.id == "p0" and request.sample == 0)
        order = InOrder([Prompt(f"p{i}", (0,), "") for i in range(40)])
        groups = collection_of(engine, order, n=2, prompts=2, tokens_left=tokens_left).run(dynamic())
        return len(engine.rounds), [group.prompt.id for group in groups]

    assert run(math.inf) == (10, ["p0"])
    assert run(8) == (3, ["p0"]), "4 tokens of the first round, 2 of each after it"
    assert run(1) == (1, ["p0"])


def test_equal_rewards_are_those_that_are_the_same_numbers() -> None:
    """The deviation of three times 0.1 is 1.4e-17, and 0.1 + 2e-17 is 0.1: no group is mixed by rounding."""
    groups = [scored(0.1, 0.1, 0.1), scored(0.1, 0.1, 0.1 + 1e-16), scored()]
    assert [group.rewards_differ for group in groups] == [False, True, False]


# Whole runs

TRAINED = ("record.rollouts=-1", "optim.lr=1e-3", "eval.every=0")


DYNAMIC = (*TRAINED, "collector=dynamic", "collector.most_rounds=5")


def test_what_is_dropped_is_told_recorded_and_seen(tmp_path: Path) -> None:
    trained(tmp_path, *DYNAMIC, "curriculum=target", "task.train_problems=14", "train.steps=7")
    metrics, rollouts = rows(tmp_path), [json.loads(line) for line in records(tmp_path)[1].splitlines()]
    steps = metrics[1:]
    left = [row for row in rollouts if row["reason"] == NOT_TAKEN]
    assert sum(row["collect/dropped_groups"] for row in steps) == len(left) / 4 > 0
    assert sum(row["collect/tokens_dropped"] for row in steps) == sum(row["length"] for row in left)
    assert not any(row["kept"] for row in left) and {row["advantage"] for row in left} == {None}
    assert len(rollouts) == steps[-1]["rollouts/generated"], "each is in the records once"
    assert sum(row["length"] for row in rollouts) == steps[-1]["tokens/generated"]
    visits = load_state(tmp_path / "checkpoints" / "step_000007")["rules"]["history"]["visits"]
    assert sum(map(len, visits.values())) >= len({(row["step"], row["prompt_id"]) for row in left})


# Replies that were cut off


def lines(trainer: Any) -> list[Any]:
    [recorder] = trainer._parts.trackers
    return [example for record in recorder.records for example in record.examples]


@pytest.mark.parametrize(("m", "collector"), [(2, equal), (4, dynamic(surplus=1.0, most_rounds=2))])
def test_none_that_was_cut_off_is_kept_where_they_are_left_out(tmp_path: Path, m: int, collector: Any) -> None:
    settings = replace(settings_for(tmp_path, truncated="leave_out", steps=4), m=m, sampling=Sampling.plain(14))
    settings = replace(settings, record=replace(settings.record, rollouts=-1))
    trainer = make_trainer(settings, downsample=pods.maxvar, collector=collector)
    trainer.fit()
    cut = [one for one in lines(trainer) if one.finish == "length"]
    ended = [one for one in lines(trainer) if one.finish != "length"]
    assert cut and not any(one.kept for one in cut)
    assert {one.reason for one in cut} <= {CUT_OFF, NOT_TAKEN}
    assert any(one.kept for one in ended)


@pytest.mark.parametrize(("m", "counted"), [(8, False), (2, True)])
def test_a_group_that_differs_by_what_is_left_out_alone_is_dropped(tmp_path: Path, m: int, counted: bool) -> None:
    """What was cut off is wrong here. Where it is in no statistics and the others are all right, none would teach."""
    settings = replace(settings_for(tmp_path, truncated="leave_out", steps=3, prompts=1), n=8, m=m)
    settings = replace(settings, sampling=Sampling.plain(14), record=replace(settings.record, rollouts=-1))
    correction = made.ready("correction", "none", count_rejected=counted)
    trainer = make_trainer(settings, downsample=pods.maxvar, correction=correction, collector=dynamic())
    trainer._parts.runtime.task.reward = lambda prompt, rollout: Reward(  # type: ignore[method-assign]
        float(rollout.finish is Finish.EOS and (prompt.token_ids[0] % 2 or rollout.request.sample % 2))
    )
    trainer.fit()
    trained_on = [one for one in lines(trainer) if one.kept]
    assert trained_on and all(one.advantage for one in trained_on)
    assert {one.reason for one in lines(trainer)} >= {CUT_OFF, NOT_TAKEN}


def test_what_was_cut_off_earns_nothing_where_that_is_asked() -> None:
    engine = Table({"p0": [(3, True), (9, True)]})
    collection = collection_of(
        engine, InOrder([Prompt("p0", (0,), "")]), n=2, prompts=1, sampling=Sampling.plain(9), truncated="zero"
    )
    (group,) = collection.run(dynamic())
    assert group.totals.tolist() == [1.0, 0.0], "and so the group is mixed"
    assert [reward.parts["correct"] for reward in group.rewards] == [1.0, 0.0]
    assert group.solved == 1


def test_an_episode_is_cut_off_where_a_limit_of_tokens_ends_it_and_not_its_last_turn(tmp_path: Path) -> None:
    """`task=guess` with one token a turn: a turn that is cut goes on to the next, and one that ends is an end."""
    words = ("task=guess", "train.truncated=leave_out", "record.rollouts=-1", "sampling.max_new_tokens=9")
    trained(tmp_path, *words, "train.steps=1")
    found = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert all((row["finish"] == "length") == (row["reason"] == CUT_OFF) for row in found if not row["kept"])
    assert not any(row["kept"] for row in found if row["finish"] == "length")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("collector=dynamic collector.most_rounds=0", "collector.most_rounds=0"),
        ("collector=dynamic collector.surplus=-1", "collector.surplus=-1"),
        ("train.truncated=drop", "train.truncated=drop"),
        ("train.truncated=zero +task.weights.overlong=1", "train.truncated=train or leave_out"),
        ("task.overlong_tokens=400", "sampling.max_new_tokens=128"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(words: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        check(settings_of(*words.split()))
    (line,) = refused.value.problems
    assert said in line
