"""Rounds of a step: how requests are numbered and seeded, what a collector may not do, and what is remembered."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra.utils
import pytest
import torch
from bank import Scripted, collection_of, group_of
from test_train import lasting, make_trainer, newest, settings_for
from typer.testing import CliRunner

from grpo_cli.cli.main import app
from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.epochs import Epochs, of_kind
from grpo_cli.collect.equal import equal
from grpo_cli.collect.rehearsal import CollectionSize, rehearsed
from grpo_cli.collect.requests import requests_for
from grpo_cli.config.choices import choices, shipped
from grpo_cli.engine.costs import together
from grpo_cli.history import History
from grpo_cli.interfaces import Collection, Collector, Rounds
from grpo_cli.methods import pods
from grpo_cli.runs.checkpoint import load_state
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import EngineStats, GroupRequest, Prompt, Round, ScoredGroup

PROBLEMS = [Prompt(f"q{i}", (i, 1), "") for i in range(10)]


def step_of(script: Scripted, *, prompts: int = 2, step: int = 4) -> StepCollection:
    order = Epochs(PROBLEMS, prompts, 7)
    return collection_of(script, order, n=3, prompts=prompts, seed=7, step=step, sampling=Sampling.plain(8))


def collected(collector: Collector, script: Scripted | None = None, **numbers: int) -> list[ScoredGroup]:
    script = script or Scripted()
    return step_of(script, **numbers).run(collector, script)


def twice(collection: Collection) -> Rounds:
    """Two of each of two problems, then three more of the one that has no success."""
    groups = yield Round(tuple(GroupRequest(prompt, 2) for prompt in collection.pick(2)))
    failed = [group for group in collection.score(groups) if group.solved == 0]
    yield Round(tuple(GroupRequest(group.prompt, 3) for group in failed))
    collection.note("failed", float(len(failed)))
    return None


# One step


def test_the_plain_collector_asks_for_what_a_plain_step_does() -> None:
    script = Scripted()
    groups = collected(equal, script)
    prompts = Epochs(PROBLEMS, 2, 7).pick(4, 2, frozenset())
    assert [list(asked) for asked in script.rounds] == [requests_for(prompts, 3, Sampling.plain(8), seed=7, step=4)]
    assert [group.prompt for group in groups] == prompts
    assert [[r.request.sample for r in group.rollouts] for group in groups] == [[0, 1, 2]] * 2


def test_a_second_round_goes_on_where_the_first_has_ended() -> None:
    script = Scripted(lambda request: request.sample == 3)
    collection = step_of(script)
    groups = collection.run(twice, script)
    first = groups[0].prompt
    assert [[r.request.sample for r in group.rollouts] for group in groups] == [[0, 1, 2, 3, 4]] * 2
    assert [group.totals.tolist() for group in groups] == [[0.0, 0.0, 0.0, 1.0, 0.0]] * 2
    assert [request.seed for request in script.rounds[1][:3]] == [
        request.seed for request in requests_for([first], 5, Sampling.plain(8), seed=7, step=4)[2:]
    ], "a sample's stream does not depend on the round that asked for it"
    assert len(script.judged) == 10, "each is judged once"
    assert collection.metrics() == {
        "collect/rounds": 2.0,
        "collect/problems": 2.0,
        "collect/rollouts_min": 5.0,
        "collect/rollouts_max": 5.0,
        "collect/failed": 2.0,
    }
    assert collection.stats.generated_tokens == 4 + 6


def test_a_collector_may_leave_groups_out_of_training() -> None:
    def one(collection: Collection) -> Rounds:
        prompts = collection.pick(3)
        yield Round(tuple(GroupRequest(prompt, 2) for prompt in prompts))
        return [prompts[2].id, prompts[0].id]

    script = Scripted()
    groups = collected(one, script)
    assert [group.prompt.id for group in groups] == [script.rounds[0][i].prompt.id for i in (0, 4)]
    assert len(script.judged) == 4, "what is not trained on is not judged"


def test_one_step_picks_no_problem_twice() -> None:
    def thrice(collection: Collection) -> Rounds:
        for _ in range(3):
            yield Round(tuple(GroupRequest(prompt, 1) for prompt in collection.pick(3)))
        return None

    for step in range(12):  # an epoch's end falls into some of them
        assert len({group.prompt.id for group in collected(thrice, step=step, prompts=3)}) == 9


def test_more_problems_than_there_are_cannot_be_picked() -> None:
    def greedy(collection: Collection) -> Rounds:
        yield Round(tuple(GroupRequest(prompt, 1) for prompt in collection.pick(8)))
        yield Round(tuple(GroupRequest(prompt, 1) for prompt in collection.pick(3)))
        return None

    with pytest.raises(UserError, match="step 5 asks for 11 different problems, but the task has 10"):
        collected(greedy)


# What a collector of one's own may do wrong


def yielding(*rounds: Callable[[Collection], Any], returns: Any = None) -> Any:
    """A collector of these rounds."""

    def collector(collection: Collection) -> Any:
        for make in rounds:
            yield make(collection)
        return returns

    return collector


def asking(count: int, **changed: Any) -> Callable[[Collection], Round]:
    """A round of so many rollouts of a new problem, or of another by its name."""
    return lambda collection: Round((GroupRequest(replace(collection.pick(1)[0], **changed), count),))


def endless(collection: Collection) -> Rounds:
    [prompt] = collection.pick(1)
    while True:
        yield Round((GroupRequest(prompt, 1),))


WRONG: Mapping[str, Any] = {
    "ended without a round: it has to yield at least one": yielding(),
    "round 1 of the collector is empty": yielding(lambda collection: Round(())),
    "round 1 .* asks for 0 rollouts of problem 'rehearsal-0': 1 is the least": yielding(asking(0)),
    "round 2 .* names problem 'mine', which this step has not picked": yielding(asking(1), asking(1, id="mine")),
    "names problem 'rehearsal-0', which this step has not picked": yielding(asking(1, token_ids=(9, 9))),
    "round 1 of the collector is a list: yield Round": yielding(lambda collection: [*collection.pick(1)]),
    "has no end: it asked for more than 1000 rounds in one step": endless,
    "returned problem 'mine', of which it has requested nothing": yielding(asking(1), returns=["mine"]),
    "returned no problem": yielding(asking(1), returns=[]),
    "is no generator, but a list: yield its rounds": lambda collection: [Round(())],
    r"raised ZeroDivisionError: .*test_collection.py, line \d+": yielding(lambda collection: collection.n // 0),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_cannot_be_collected_is_found_in_the_rehearsal(said: str) -> None:
    with pytest.raises(UserError, match=said):
        rehearsed(WRONG[said], n=4, prompts=3)


# Rehearsal


def until_solved(collection: Collection) -> Rounds:
    """One more of each problem without a success, four at most."""
    groups = yield Round(tuple(GroupRequest(prompt, 1) for prompt in collection.pick(2 * collection.prompts)))
    for _ in range(3):
        failed = [group for group in collection.score(groups) if group.solved == 0]
        if failed:
            groups = yield Round(tuple(GroupRequest(group.prompt, 1) for group in failed))
    return None


def test_a_rehearsal_tells_the_most_that_a_step_may_ask_for() -> None:
    assert rehearsed(equal, n=16, prompts=5) == CollectionSize.equal(16, 5) == CollectionSize(5, 5, 80, 80, 1, 80)
    # all wrong: four rounds of one each for 6 problems; in turns: sample 1 is right
    assert rehearsed(until_solved, n=9, prompts=3) == CollectionSize(6, 6, 6, 24, 4, 24, unequal=True)


@pytest.mark.usefixtures("small_rehearsal")
def test_a_large_step_is_rehearsed_small_and_told_whole() -> None:
    assert rehearsed(equal, n=64, prompts=1000) == CollectionSize.equal(64, 1000)
    assert rehearsed(equal, n=1_000_000, prompts=2) == CollectionSize.equal(1_000_000, 2)


class Counting:
    """A collector that remembers how often it was asked and told."""

    def __init__(self) -> None:
        self.asked, self.told = 0, 0

    def __call__(self, collection: Collection) -> Rounds:
        self.asked += 1
        return equal(collection)

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        self.told += 1
        return {"collect/told": float(self.told)}

    def state_dict(self) -> Mapping[str, Any]:
        return {"kind": "counting", "told": self.told}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self.told = of_kind(state, "collector", "counting")["told"]


def test_a_rehearsal_teaches_nothing() -> None:
    counting = Counting()
    rehearsed(counting, n=4, prompts=3)
    assert counting.asked == 0


# What several rounds cost


def test_costs_of_rounds_are_put_together() -> None:
    one = EngineStats(10, 40, 5, slots=4, slot_utilisation=1.0, kv_peak_bytes=100)
    two = EngineStats(30, 30, 5, slots=2, slot_utilisation=0.5, kv_peak_bytes=300)
    one = replace(one, details={"engine/rows_mean": 4.0, "engine/restarts": 1.0, "engine/kv_held_bytes": 70.0})
    two = replace(two, details={"engine/rows_mean": 1.0, "engine/restarts": 2.0, "engine/kv_held_bytes": 60.0})
    both = together([one, two])
    assert (both.decode_steps, both.generated_tokens, both.prefill_tokens) == (40, 70, 10)
    assert both.slot_utilisation == pytest.approx((40 + 30) / (40 + 60)) and both.kv_peak_bytes == 300
    assert both.details == {
        "engine/rows_mean": (4 * 10 + 1 * 30) / 40,
        "engine/restarts": 3.0,
        "engine/kv_held_bytes": 70.0,
    }
    assert together([one]) is one


# Whole runs


def metrics_of(trainer: Any) -> list[dict[str, float]]:
    [recorder] = trainer._parts.trackers
    return [lasting(record.metrics) for record in recorder.records]


def test_a_run_says_what_it_collected_and_has_seen(tmp_path: Path) -> None:
    trainer = make_trainer(settings_for(tmp_path, steps=5))
    trainer.fit()
    rows = metrics_of(trainer)[1:]
    assert [row["prompts/distinct"] for row in rows] == [3.0, 6.0, 9.0, 12.0, 12.0]  # of 12 problems, 3 a step
    assert all(row["collect/rounds"] == 1.0 for row in rows)
    assert all(row["collect/rollouts_min"] == row["collect/rollouts_max"] == 4.0 for row in rows)
    assert all(0.0 <= row["group/mixed"] <= 3.0 for row in rows)


def halves(collection: Collection) -> Rounds:
    """As `equal`, in two rounds."""
    prompts = collection.pick(collection.prompts)
    first = collection.n // 2
    yield Round(tuple(GroupRequest(prompt, first) for prompt in prompts))
    yield Round(tuple(GroupRequest(prompt, collection.n - first) for prompt in prompts))
    return None


def test_in_how_many_rounds_rollouts_are_made_moves_no_weight(tmp_path: Path) -> None:
    """On a CPU in float32, where a rollout does not depend on its company."""
    trainers = [make_trainer(settings_for(tmp_path / name), collector=rule) for name, rule in RULES.items()]
    for trainer in trainers:
        trainer.fit()
    one, two = ([v.clone() for v in trainer._parts.bench.model.parameters()] for trainer in trainers)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    rounds = [[row["collect/rounds"] for row in metrics_of(trainer)[1:]] for trainer in trainers]
    assert rounds == [[1.0] * 4, [2.0] * 4]


RULES: Mapping[str, Collector] = {"equal": equal, "halves": halves}


def longer(collection: Collection) -> Rounds:
    """The first problem three times as often as the others."""
    prompts = collection.pick(collection.prompts)
    counts = [3 * collection.n, *[collection.n] * (len(prompts) - 1)]
    yield Round(tuple(GroupRequest(prompt, count) for prompt, count in zip(prompts, counts, strict=True)))
    return None


@pytest.mark.parametrize("m", [4, 3])
def test_a_group_that_is_larger_than_n_is_trained_on_whole_unless_m_is_less(tmp_path: Path, m: int) -> None:
    settings = replace(settings_for(tmp_path, steps=1), m=m)
    trainer = make_trainer(settings, collector=longer, downsample=pods.random)
    trainer.fit()
    assert metrics_of(trainer)[1]["rollouts/trained"] == (12 + 4 + 4 if m == 4 else 3 * 3)


def test_a_run_ends_once_it_has_generated_enough(tmp_path: Path) -> None:
    whole = make_trainer(settings_for(tmp_path / "whole"))
    whole.fit()
    spent = [row["tokens/generated"] for row in metrics_of(whole)[1:]]
    short = make_trainer(settings_for(tmp_path / "short", max_generated=spent[1]))
    summary = short.fit()
    assert summary["status"] == "completed" and summary["step"] == 2
    assert metrics_of(short) == metrics_of(whole)[:3]
    assert "eval/accuracy" in metrics_of(short)[-1]
    assert newest(tmp_path / "short").name == "step_000002"


# What is remembered


def test_what_rules_have_learnt_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole = make_trainer(settings_for(tmp_path / "whole", steps=4), collector=Counting())
    whole.fit()
    make_trainer(settings_for(tmp_path / "parts", steps=2), collector=Counting()).fit()
    rest = make_trainer(
        settings_for(tmp_path / "parts", steps=4), checkpoint=newest(tmp_path / "parts"), collector=Counting()
    )
    rest.fit()
    assert metrics_of(rest) == metrics_of(whole)[3:]
    assert [row["collect/told"] for row in metrics_of(rest)] == [3.0, 4.0]
    assert load_state(newest(tmp_path / "parts"))["rules"] == load_state(newest(tmp_path / "whole"))["rules"]


def test_rules_that_learn_are_not_exchanged_on_the_way(tmp_path: Path) -> None:
    make_trainer(settings_for(tmp_path / "plain", steps=2)).fit()
    with pytest.raises(UserError, match="the checkpoint holds nothing for collector=counting"):
        make_trainer(settings_for(tmp_path / "plain"), checkpoint=newest(tmp_path / "plain"), collector=Counting())
    make_trainer(settings_for(tmp_path / "counting", steps=2), collector=Counting()).fit()
    with pytest.raises(UserError, match="holds what collector=counting has learnt, and this run's collector learns no"):
        make_trainer(settings_for(tmp_path / "counting"), checkpoint=newest(tmp_path / "counting"))


LEARNING = [
    (group, choice)
    for group in ("curriculum", "collector")
    for choice in choices(group)
    if hasattr(hydra.utils.get_object(shipped(group, choice)["_target_"]), "load_state_dict")
]


@pytest.mark.parametrize(("group", "choice"), LEARNING)
def test_what_a_rule_has_learned_is_given_to_no_other(group: str, choice: str) -> None:
    rule = object.__new__(hydra.utils.get_object(shipped(group, choice)["_target_"]))
    with pytest.raises(UserError, match=f"{group}=mine has .*resume with {group}=mine"):
        rule.load_state_dict({"kind": "mine"})
    if choice != "epochs":  # which goes on by the step alone
        with pytest.raises(UserError, match=f"nothing for {group}={choice}; leave {group}"):
            rule.load_state_dict(None)


MINE = """
from grpo_cli.types import GroupRequest, Round


def rule(collection, *, more):
    \"\"\"A second round for unsolved problems.\"\"\"
    prompts = collection.pick(collection.prompts)
    groups = yield Round(tuple(GroupRequest(prompt, collection.n) for prompt in prompts))
    failed = [group.prompt for group in collection.score(groups) if group.solved == 0]
    collection.note("failed", len(failed))
    if failed:
        yield Round(tuple(GroupRequest(prompt, more) for prompt in failed))
"""


def test_a_rule_of_one_s_own_is_rehearsed_run_resumed_and_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_collect.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["collector._target_=mine_collect.rule", "n=4", "train.prompts=2", "sampling.max_new_tokens=24"]
    short = ["logger=jsonl", "eval.every=0", "device=cpu"]
    runner = CliRunner()
    refused = runner.invoke(app, ["train", *words, *short, "hydra.run.dir=none"])
    assert refused.exit_code == 2 and "missing a required argument: 'more'; what else it needs" in refused.output
    assert not (tmp_path / "none").exists()
    words.append("+collector.more=3")
    done = runner.invoke(app, ["train", *words, *short, "train.steps=2", "hydra.run.dir=run"])
    assert done.exit_code == 0, done.output
    again = runner.invoke(app, ["train", "train.steps=3", "resume=run"])
    assert again.exit_code == 0, again.output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["collect/rounds"] == 1.0 + (row["collect/failed"] > 0)
        assert row["collect/rollouts_max"] == (7.0 if row["collect/failed"] else 4.0)
    profiled = runner.invoke(app, ["profile", *words, *short, "profile.steps=1", "profile.warmup=0", "hydra.run.dir=p"])
    assert profiled.exit_code == 0, profiled.output


def test_a_step_that_is_made_again_takes_the_place_of_what_it_was() -> None:
    history = History()
    history.observe(3, [group_of(PROBLEMS[0], 1, 4)])
    history.observe(3, [group_of(PROBLEMS[0], 2, 4)])
    assert [(visit.step, visit.solved) for visit in history.visits("q0")] == [(3, 2)]
    history.observe(4, [group_of(PROBLEMS[0], 3, 4)])
    history.observe(2, [group_of(PROBLEMS[0], 0, 4)])
    assert [(visit.step, visit.solved) for visit in history.visits("q0")] == [(2, 0)], "and of what came after it"
