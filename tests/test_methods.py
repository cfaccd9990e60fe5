"""DAPO (arXiv 2503.14476): the paper's recipe worked by hand, rounds until enough groups teach, replies cut off."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from bank import InOrder, Scripted, collection_of, problems
from made import composed
from small import scored
from test_resume import records, rows, trained
from typed import done, json_lines, refused

from grpo_cli.collect.equal import equal
from grpo_cli.config.choices import choices
from grpo_cli.config.prepare import build_and_check
from grpo_cli.methods.dapo import Dynamic
from grpo_cli.select import CUT_OFF
from grpo_cli.settings import Sampling
from grpo_cli.tasks.formats import overlong
from grpo_cli.tracking.examples import NOT_TAKEN
from grpo_cli.types import ENVIRONMENT, Finish, Prompt, Request, Reward, Rollout, Span


def dynamic(*, surplus: float = 0.0, most_rounds: int = 10) -> Dynamic:
    return Dynamic(surplus=surplus, most_rounds=most_rounds)


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
            yield Rollout(request, (3,) * tokens, (-1.0,) * tokens, finish)

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        right = float(self.table[prompt.id][rollout.request.sample][1])
        length = overlong(rollout, 4)
        return Reward(right + length, {"correct": right, "overlong": length})


@pytest.mark.parametrize(("truncated", "solved"), [("train", [0, 1]), ("zero", [0, 0]), ("leave_out", [0, 1])])
def test_a_reply_that_is_cut_off_earns_nothing_with_zero_whoever_judged_it(truncated, solved):
    engine = Table({"q0": [(4, False), (10, True)]})  # of at most 10 tokens
    words = {"n": 2, "prompts": 1, "sampling": Sampling.plain(10), "truncated": truncated}
    collection = collection_of(engine, InOrder(problems(1)), **words)
    (group,) = collection.run(equal)
    assert [reward.solved for reward in group.rewards] == solved
    assert truncated != "zero" or group.rewards[1].parts == {"correct": 0.0, "overlong": 0.0}
    assert collection.differs(group) == (truncated == "train"), "what is left out or zeroed teaches nothing"
    elsewhere = replace(group, rewards=(Reward(0.0), Reward(1.0)))
    (again,) = collection_of(engine, InOrder(problems(1)), **words).run(lambda step: [elsewhere])
    assert again.totals.tolist() == solved


def test_a_step_without_a_mixed_group_trains_on_even_ones():
    collection = collection_of(Scripted(), InOrder(problems(4)), n=2, prompts=2)
    assert [group.prompt.id for group in collection.run(dynamic(most_rounds=1))] == ["q0", "q1"]


@pytest.mark.parametrize(
    ("rewards", "teaches"),
    [
        ([{"correct": 1.0}, {"correct": 1.0, "overlong": -0.5}], False),
        ([{"correct": 0.0, "format": 0.1}, {"correct": 0.0}], False),
        ([{"correct": 0.3}, {"correct": 0.2, "format": 0.1}], True),
        ([{"style": 1.0}, {"style": 0.0}], True),  # an own reward without a grade
    ],
)
def test_groups_are_dropped_by_their_answers_and_not_by_penalties(rewards, teaches):
    group = scored(*(Reward(sum(parts.values(), 0.0), parts) for parts in rewards))
    assert collection_of(Table({}), InOrder([]), n=2, prompts=1).differs(group) == teaches


def test_groups_that_teach_and_their_shaped_rewards_worked_by_hand():
    """L = 10 with c = 4, two rollouts each of two problems a step. p0 is solved by both and dropped, p1, p2 are mixed.

    Rewards of p1: right, 6 tokens: 1 + 0 = 1. Wrong, 8 tokens: 0 + (10 - 4 - 8) / 4 = -1/2. Of p2: right, cut off at
    10: 1 - 1 = 0. Wrong, 10: -1.
    """
    table = {"q0": [(2, True)] * 2, "q1": [(6, True), (8, False)], "q2": [(10, True), (10, False)]}
    engine = Table(table)
    collection = collection_of(engine, InOrder(problems(3)), n=2, prompts=2, sampling=Sampling.plain(10))
    groups = collection.run(dynamic())
    assert [len(asked) for asked in engine.rounds] == [4, 2], "two problems, then the one that is lacking"
    assert [(group.prompt.id, group.totals.tolist()) for group in groups] == [("q1", [1.0, -0.5]), ("q2", [0.0, -1.0])]
    assert collection.metrics()["collect/dropped_groups"] == 1 and collection.metrics()["collect/tokens_dropped"] == 4


@pytest.mark.parametrize(
    ("tokens", "longest", "within", "part"),
    [
        (16, 20, 4, 0.0),  # L - c
        (17, 20, 4, -0.25),
        (20, 20, 4, -1.0),  # cut off, or just in time
        (18432, 20480, None, -0.5),  # as published: 16,384 are expected, and 4,096 are the cache
        (3, 3, None, -1.0),  # a fifth of 3 is one token, and no division by none
    ],
)
def test_long_replies_are_punished_in_a_straight_line(tokens, longest, within, part):
    """What an environment wrote counts, as in the limit."""
    request, spans = Request(Prompt("p", (1,), ""), 0, 0, Sampling.plain(longest)), (Span(0, 1), Span(ENVIRONMENT, 1))
    rollout = Rollout(request, (2,) * tokens, (-1.0,) * tokens, Finish.EOS, (*spans, Span(0, tokens - 2)))
    assert overlong(rollout, within) == pytest.approx(part)


def test_a_round_generates_what_is_lacking_and_a_surplus():
    engine = Scripted(lambda request: request.sample == 0 and request.prompt.id not in ("q0", "q1", "q2"))
    collection = collection_of(engine, InOrder(problems(40)), n=2, prompts=4)
    groups = collection.run(dynamic(surplus=0.5))
    rounds = [[request.prompt.id for request in requests[::2]] for requests in engine.rounds]
    assert rounds == [[f"q{i}" for i in range(6)], ["q6", "q7"]]
    assert [group.prompt.id for group in groups] == ["q3", "q4", "q5", "q6"]


def test_no_round_is_begun_once_the_run_has_its_tokens():
    def run(tokens_left: float) -> tuple[int, list[str]]:
        engine = Scripted(lambda request: request.prompt.id == "q0" and request.sample == 0)
        groups = collection_of(engine, InOrder(problems(40)), n=2, prompts=2, tokens_left=tokens_left).run(dynamic())
        return len(engine.rounds), [group.prompt.id for group in groups]

    assert run(math.inf) == (10, ["q0"])
    assert run(8) == (3, ["q0"]), "4 tokens of the first round, 2 of each after it"
    assert run(1) == (1, ["q0"])


DYNAMIC = ("record.rollouts=-1", "optim.lr=1e-3", "eval.every=0", "collector=dynamic", "collector.most_rounds=5")


def test_what_is_dropped_is_told_recorded_and_seen(tmp_path):
    trained(tmp_path, *DYNAMIC, "task.train_problems=14", "train.steps=4")
    metrics, rollouts = rows(tmp_path), [json.loads(line) for line in records(tmp_path)[1].splitlines()]
    steps = metrics[1:]
    left = [row for row in rollouts if row["reason"] == NOT_TAKEN]
    assert sum(row["collect/dropped_groups"] for row in steps) == len(left) / 4 > 0
    assert sum(row["collect/tokens_dropped"] for row in steps) == sum(row["length"] for row in left)
    assert not any(row["kept"] for row in left)
    assert len(rollouts) == steps[-1]["rollouts/generated"], "each is in the records once"
    assert sum(row["length"] for row in rollouts) == steps[-1]["tokens/generated"]


def test_an_episode_that_a_limit_of_tokens_ends_is_cut_off(tmp_path):
    """Of `task=guess`; one that its task ends is not."""
    words = ("task=guess", "train.truncated=leave_out", "record.rollouts=-1", "sampling.max_new_tokens=9")
    trained(tmp_path, *words, "train.steps=1")
    found = json_lines(tmp_path / "rollouts.jsonl")
    assert {"length", "eos"} <= {row["finish"] for row in found}
    assert all((row["finish"] == "length") == (row["reason"] == CUT_OFF) for row in found if not row["kept"])
    assert not any(row["kept"] for row in found if row["finish"] == "length")


# PODS end to end: the named runs, and a user's own rule.


@pytest.mark.parametrize("name", [name for name in choices("experiment") if name != "none"])
def test_every_experiment_can_be_run_as_it_stands_and_pods_trains_on_a_quarter_chosen_by_variance(name):
    run = composed(f"experiment={name}")
    build_and_check(run)
    if name.startswith("pods_"):
        assert (run.n, run.m) == (64, 16) and run.parts["advantage"]["stats_over"] == "kept"
        assert run.parts["downsample"]["_target_"] == "grpo_cli.methods.pods.maxvar"


SMALL = ["n=4", "m=2", "train.steps=1", "train.prompts=2", "sampling.max_new_tokens=6", "eval.every=0", "logger=jsonl"]

USER_RULES = """
def ends(group, keep, rng, first=0):
    return [first, len(group.rollouts) - 1]

def twice(group, keep, rng):
    # right on the group that a rule is tried on before the run, wrong in the run
    return [0, 1] if group.prompt.id.startswith("synthetic") else [3, 3]
"""


def test_a_rule_of_one_s_own_decides_what_is_trained_on_and_stops_the_run_if_it_answers_wrongly(tmp_path, monkeypatch):
    (tmp_path / "rules_of_a_pods_user.py").write_text(USER_RULES)
    monkeypatch.chdir(tmp_path)
    words = (*SMALL, "downsample._target_=rules_of_a_pods_user.ends", "+downsample.first=1", "record.rollouts=-1")
    done("train", *words, "hydra.run.dir=run")
    (record,) = (json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()[1:])
    assert (record["rollouts/generated"], record["rollouts/trained"]) == (8, 4)
    rows = json_lines(tmp_path / "run/rollouts.jsonl")
    assert [row["sample"] for row in rows if row["kept"]] == [1, 3, 1, 3]
    said = refused("train", *SMALL, "downsample._target_=rules_of_a_pods_user.twice", "hydra.run.dir=wrong")
    assert "rules_of_a_pods_user.twice returned [3, 3] for prompt train-" in said
