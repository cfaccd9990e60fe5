"""A step's rollouts: how requests are numbered and seeded, what a collector may not return, and what is remembered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
from bank import Scripted, collection_of
from test_train import lasting, make_trainer, newest, settings_for
from typer.testing import CliRunner

import grpo_cli.collect.collection as collection_module
from grpo_cli.cli.main import app
from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.epochs import Epochs, of_kind
from grpo_cli.collect.equal import equal
from grpo_cli.collect.requests import requests_for
from grpo_cli.config.instantiate import Factories
from grpo_cli.config.trial import try_rules
from grpo_cli.engine.common import together
from grpo_cli.interfaces import StepRollouts
from grpo_cli.runs.checkpoint import load_state
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import EngineStats, Prompt, Reward, ScoredGroup

PROBLEMS = [Prompt(f"q{i}", (i, 1), "") for i in range(10)]


def step_of(script: Scripted, *, prompts: int = 2, step: int = 4, **words: Any) -> StepCollection:
    words = {"seed": 7, "sampling": Sampling.plain(8), "problems": len(PROBLEMS)} | words
    return collection_of(script, Epochs(PROBLEMS, prompts, 7), n=3, prompts=prompts, step=step, **words)


def collected(collector: Any, script: Scripted | None = None, **words: Any) -> list[ScoredGroup]:
    return step_of(script or Scripted(), **words).run(collector)


def twice(step: StepRollouts) -> list[ScoredGroup]:
    """Two of each of two problems, then three more of those that have no success."""
    groups = step.score(step.generate((prompt, 2) for prompt in step.pick(2)))
    failed = [group.prompt for group in groups if group.solved == 0]
    step.note("failed", len(failed))
    more = step.score(step.generate((prompt, 3) for prompt in failed))
    assert [group.prompt for group in more] == failed, "only the groups that were requested"
    return step.score(step.groups)


def sizes(groups: Sequence[ScoredGroup]) -> list[list[int]]:
    return [[rollout.request.sample for rollout in group.rollouts] for group in groups]


def test_a_second_round_goes_on_where_the_first_has_ended() -> None:
    script = Scripted(lambda request: request.sample == 3)
    collection = step_of(script)
    groups = collection.run(twice)
    assert sizes(groups) == [[0, 1, 2, 3, 4]] * 2
    assert [group.totals.tolist() for group in groups] == [[0.0, 0.0, 0.0, 1.0, 0.0]] * 2
    alone = requests_for([groups[0].prompt], 5, Sampling.plain(8), seed=7, step=4)
    assert script.rounds[1][:3] == alone[2:], "a sample's stream does not depend on its round"
    assert len(script.judged) == 10, "each is judged once"
    assert collection.metrics() == {
        "collect/rounds": 2.0,
        "collect/problems": 2.0,
        "collect/rollouts_min": 5.0,
        "collect/rollouts_max": 5.0,
        "collect/dropped_groups": 0.0,
        "collect/tokens_dropped": 0.0,
        "collect/failed": 2.0,
    }
    assert collection.stats.generated_tokens == 4 + 6


def test_what_is_left_out_of_training_is_counted_by_the_core() -> None:
    def some(step: StepRollouts) -> list[ScoredGroup]:
        groups = step.generate((prompt, 2) for prompt in step.pick(4))
        return [*step.score([groups[2], groups[0], groups[3]])][:2]

    script = Scripted()
    collection = step_of(script)
    groups = collection.run(some)
    assert [group.prompt.id for group in groups] == [script.rounds[0][place].prompt.id for place in (4, 0)]
    assert len(script.judged) == 6 and len(collection.finished_groups) == 3, "one group was not judged"
    metrics = collection.metrics()
    assert (metrics["collect/dropped_groups"], metrics["collect/tokens_dropped"]) == (2.0, 4.0)


def test_a_step_picks_no_problem_twice_and_no_more_than_there_are() -> None:
    def thrice(step: StepRollouts) -> list[ScoredGroup]:
        return [group for _ in range(3) for group in step.score(step.generate((p, 1) for p in step.pick(3)))]

    for step in range(12):  # an epoch's end falls into some of them
        assert len({group.prompt.id for group in collected(thrice, step=step, prompts=3)}) == 9

    def greedy(step: StepRollouts) -> list[ScoredGroup]:
        picked = [*step.pick(8, {PROBLEMS[0].id}), *step.pick(8, {PROBLEMS[0].id})]
        assert {prompt.id for prompt in picked} == {prompt.id for prompt in PROBLEMS[1:]} and not step.pick(1, {"q0"})
        return step.score(step.generate([(picked[0], 1), (picked[1], 0)]))

    assert sizes(collected(greedy)) == [[0]]


# What a collector of one's own may do wrong


def endless(step: StepRollouts) -> list[ScoredGroup]:
    [prompt] = step.pick(1)
    while True:
        step.generate([(prompt, 1)])


def changed(step: StepRollouts) -> list[ScoredGroup]:
    [prompt] = step.pick(1)
    return step.score(step.generate([(replace(prompt, token_ids=(9, 9)), 1)]))


def generator(step: StepRollouts) -> Any:
    yield equal(step)


WRONG: Mapping[str, Any] = {
    "returned None: return a list": lambda step: None,
    r"returned \[\]: return a list": lambda step: [],
    "returned <generator": generator,
    "returned 'q' unscored": lambda step: ["q"],
    "returned problem '.*-0' unscored: return what step.score": lambda step: step.generate([(step.pick(1)[0], 2)]),
    "returned problem '.*-0' twice": lambda step: equal(step)[:1] * 2,
    "returned problem '.*-0' unscored:": lambda step: [replace(equal(step)[0], rewards=(Reward(1.0),))],
    r"requests \('p', 2\): give step": lambda step: step.generate([("p", 2)]),
    "or .problem, number.": lambda step: step.generate([(step.pick(1)[0], -2)]),
    "two problems with the id '.*-0'": changed,
    f"requests {10**15} problems": lambda step: step.pick(10**15),
    "has no end: it made 40 calls in one step": endless,
    r"raised ZeroDivisionError: .*test_collection.py, line \d+": lambda step: step.n // 0,
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_collected_is_found_on_a_made_up_step(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection_module, "MOST_CALLS", 40)
    rules = replace(Factories.of(made.settings().parts).rules(), collector=WRONG[words])
    with pytest.raises(UserError, match=words) as refused:
        try_rules(rules, n=4, m=4, prompts=3)
    assert "collector" in str(refused.value) and (len(str(refused.value).split()) <= 25 or "line" in words)


class Counting:
    """A collector that remembers how often it was called and shown."""

    def __init__(self) -> None:
        self.called, self.shown = 0, 0

    def __call__(self, step: StepRollouts) -> list[ScoredGroup]:
        self.called += 1
        return equal(step)

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        self.shown += 1
        return {"collect/shown": float(self.shown)}

    def state_dict(self) -> Mapping[str, Any]:
        return {"kind": "counting", "shown": self.shown}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self.shown = of_kind(state, "collector", "counting")["shown"]


def test_costs_of_rounds_are_put_together() -> None:
    one = EngineStats(10, 40, 5, slots=4, slot_utilisation=1.0, kv_peak_bytes=100)
    two = EngineStats(30, 30, 5, slots=2, slot_utilisation=0.5, kv_peak_bytes=300)
    one = replace(one, details={"engine/workers": 4.0, "engine/restarts": 1.0, "engine/kv_held_bytes": 70.0})
    two = replace(two, details={"engine/workers": 1.0, "engine/restarts": 2.0, "engine/kv_held_bytes": 60.0})
    both = together([one, two])
    assert (both.decode_steps, both.generated_tokens, both.prefill_tokens) == (40, 70, 10)
    assert both.slot_utilisation == pytest.approx((40 + 30) / (40 + 60)) and both.kv_peak_bytes == 300
    assert both.details == {
        "engine/workers": (4 * 10 + 1 * 30) / 40,
        "engine/restarts": 3.0,
        "engine/kv_held_bytes": 70.0,
    }
    assert together([one]) is one


# Whole runs


def metrics_of(trainer: Any) -> list[dict[str, float]]:
    [recorder] = trainer._parts.trackers
    return [lasting(record.metrics) for record in recorder.records]


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


def test_what_rules_have_learnt_goes_on_from_a_checkpoint_and_to_no_other(tmp_path: Path) -> None:
    whole = make_trainer(settings_for(tmp_path / "whole", steps=4), collector=Counting())
    whole.fit()
    make_trainer(settings_for(tmp_path / "parts", steps=2), collector=Counting()).fit()
    saved = newest(tmp_path / "parts")
    with pytest.raises(UserError, match="holds what collector=counting has learnt, and this run's collector learns no"):
        make_trainer(settings_for(tmp_path / "parts"), checkpoint=saved)
    rest = make_trainer(settings_for(tmp_path / "parts", steps=4), checkpoint=saved, collector=Counting())
    rest.fit()
    assert metrics_of(rest) == metrics_of(whole)[3:]
    assert [row["collect/shown"] for row in metrics_of(rest)] == [3.0, 4.0]
    assert load_state(newest(tmp_path / "parts"))["rules"] == load_state(newest(tmp_path / "whole"))["rules"]
    make_trainer(settings_for(tmp_path / "plain", steps=2)).fit()
    with pytest.raises(UserError, match="the checkpoint holds nothing for collector=counting"):
        make_trainer(settings_for(tmp_path / "plain"), checkpoint=newest(tmp_path / "plain"), collector=Counting())


MINE = """
def rule(step, *, more):
    \"\"\"A second round for unsolved problems.\"\"\"
    groups = step.score(step.generate((prompt, step.n) for prompt in step.pick(step.prompts)))
    failed = [group.prompt for group in groups if group.solved == 0]
    step.note("failed", len(failed))
    step.generate((prompt, more) for prompt in failed)
    return step.score(step.groups)
"""


def test_a_collector_of_one_s_own_is_tried_run_resumed_and_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_collect.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["collector._target_=mine_collect.rule", "n=4", "train.prompts=2", "sampling.max_new_tokens=12"]
    short = ["logger=jsonl", "eval.every=0", "device=cpu"]
    runner = CliRunner()
    refused = runner.invoke(app, ["train", *words, *short, "hydra.run.dir=none"])
    assert refused.exit_code == 2 and "missing a required argument: 'more'" in refused.output
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
