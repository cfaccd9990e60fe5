"""A step's rollouts: how requests are numbered and seeded, what a collector may not return, and what is remembered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from bank import InOrder, Scripted, collection_of
from test_train import make_trainer, newest, settings_for
from typed import done, json_lines, lasting, refused

import grpo_cli.collect.collection as collection_module
from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.epochs import Epochs
from grpo_cli.collect.equal import equal
from grpo_cli.collect.requests import group_rollouts, requests_for, seed_of
from grpo_cli.engine.common import together
from grpo_cli.interfaces import StepRollouts
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.turns import completed_future
from grpo_cli.types import EngineStats, Prompt, Reward, Rollout, ScoredGroup

PROBLEMS = [Prompt(f"q{i}", (i, 1), "") for i in range(10)]


def step_of(script: Scripted, *, prompts: int = 2, step: int = 4, **words: Any) -> StepCollection:
    words = {"seed": 7, "sampling": Sampling.plain(8), "prompt_count": len(PROBLEMS)} | words
    return collection_of(script, Epochs(PROBLEMS, prompts, 7), n=3, prompts=prompts, step=step, **words)


def twice(step: StepRollouts) -> list[ScoredGroup]:
    """Two of each of two problems, then three more of those that have no success."""
    groups = step.score(step.generate((prompt, 2) for prompt in step.pick(2)))
    failed = [group.prompt for group in groups if group.solved == 0]
    step.note("failed", len(failed))
    more = step.score(step.generate((prompt, 3) for prompt in failed))
    assert [group.prompt for group in more] == failed, "only the groups that were requested"
    return step.score(step.groups)


def test_a_second_round_goes_on_where_the_first_has_ended() -> None:
    script = Scripted(lambda request: request.sample == 3)
    collection = step_of(script)
    groups = collection.run(twice)
    assert [[one.request.sample for one in group.rollouts] for group in groups] == [[0, 1, 2, 3, 4]] * 2
    assert [group.totals.tolist() for group in groups] == [[0.0, 0.0, 0.0, 1.0, 0.0]] * 2
    alone = requests_for([groups[0].prompt], 5, Sampling.plain(8), seed=7, step=4)
    assert script.rounds[1][:3] == alone[2:], "a sample's stream does not depend on its round"
    assert len(script.judged) == 10, "each is judged once"
    counts = {"rounds": 2, "problems": 2, "rollouts_min": 5, "rollouts_max": 5, "dropped_groups": 0, "failed": 2}
    assert collection.metrics() == {f"collect/{name}": x for name, x in counts.items()} | {"collect/tokens_dropped": 0}
    assert collection.stats.generated_tokens == 4 + 6


def test_a_step_picks_no_problem_twice_and_no_more_than_there_are() -> None:
    def greedy(step: StepRollouts) -> list[ScoredGroup]:
        picked = [*step.pick(4, {"q0"}), *step.pick(8, {"q0"})]
        assert sorted(prompt.id for prompt in picked) == [f"q{i}" for i in range(1, 10)] and not step.pick(1, {"q0"})
        return step.score(step.generate([(picked[0], 1), (picked[1], 0)]))

    for step in range(6):  # an epoch's end falls into some of them
        assert [len(group.rollouts) for group in step_of(Scripted(), step=step).run(greedy)] == [1]


WRONG: Mapping[str, Any] = {  # what a collector of one's own may do wrong
    "returned None: return a list": lambda step: None,
    r"returned \[\]: return a list": lambda step: [],
    "returned <generator": lambda step: (one for one in equal(step)),
    "returned 'q' unscored": lambda step: ["q"],
    "returned prompt '.*' unscored: return what step.score": lambda step: step.generate([(step.pick(1)[0], 2)]),
    "returned prompt '.*' twice": lambda step: equal(step)[:1] * 2,
    "returned prompt '.*' unscored:": lambda step: [replace(equal(step)[0], rewards=(Reward(1.0),))],
    r"requests \('p', 2\): give step": lambda step: step.generate([("p", 2)]),
    "or .prompt, number.": lambda step: step.generate([(step.pick(1)[0], -2)]),
    "two prompts with the id '.*'": lambda step: step.generate([(replace(step.pick(1)[0], token_ids=(9, 9)), 1)]),
    f"requests {10**15} prompts": lambda step: step.pick(10**15),
    "has no end: it made 40 calls in one step": lambda step: [*map(step.generate, repeat([(step.pick(1)[0], 1)]))],
    r"raised ZeroDivisionError: .*test_collection.py, line \d+": lambda step: step.n // 0,
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_collected_stops_the_run_by_name(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection_module, "MOST_CALLS", 40)
    with pytest.raises(UserError, match=words) as refused:
        step_of(Scripted(lambda request: True)).run(WRONG[words])
    assert "collector" in str(refused.value) and (len(str(refused.value).split()) <= 25 or "line" in words)


NO_REWARDS = [
    *((Reward(bad), r"sample 1 of prompt q\d: let it return finite numbers") for bad in (math.nan, -math.inf, -9.1e15)),
    (0.5, "returned 0.5: return a Reward"),
    (None, "task .*Bad raised ZeroDivisionError"),
]


@pytest.mark.parametrize(("bad", "words"), NO_REWARDS)
def test_what_is_no_reward_stops_the_run_by_name(bad: Any, words: str) -> None:
    class Bad(Scripted):
        def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
            return (bad or Reward(1 / 0)) if rollout.request.sample == 1 else Reward(2.0**53)

    with pytest.raises(UserError, match=words):
        step_of(Bad()).run(equal)


def test_seeds_keep_names_apart_and_groups_are_whole_whatever_ends_first() -> None:
    assert len({seed_of(*names) for names in [(1, 12), (11, 2), (1, 1, 2), (0, 1, "a"), (0, "a", 1)]}) == 5
    requests = requests_for(PROBLEMS[:2], 3, Sampling.plain(8), seed=0, step=0)
    groups = group_rollouts(PROBLEMS[:2], Scripted().generate(requests))
    assert [rollout.request for group in groups for rollout in group.rollouts] == requests


def test_costs_of_rounds_are_put_together() -> None:
    one = EngineStats(10, 40, 5, slots=4, slot_utilisation=1.0, kv_peak_bytes=100)
    two = EngineStats(30, 30, 5, slots=2, slot_utilisation=0.5, kv_peak_bytes=300)
    one = replace(one, details={"engine/workers": 4.0, "engine/preemptions": 1.0, "engine/kv_held_bytes": 70.0})
    two = replace(two, details={"engine/workers": 1.0, "engine/preemptions": 2.0, "engine/kv_held_bytes": 60.0})
    both, mean = together([one, two]), (4 * 10 + 1 * 30) / 40
    assert (both.decode_steps, both.generated_tokens, both.prefill_tokens) == (40, 70, 10)
    assert both.slot_utilisation == pytest.approx((40 + 30) / (40 + 60)) and both.kv_peak_bytes == 300
    assert both.details == {"engine/workers": mean, "engine/preemptions": 3.0, "engine/kv_held_bytes": 70.0}
    assert together([one]) is one


# Whole runs


def metrics_of(trainer: Any) -> list[dict[str, float]]:
    trainer.fit()
    [recorder] = trainer._parts.trackers
    return [lasting(record.metrics) for record in recorder.records]


def test_a_run_ends_once_it_has_generated_enough(tmp_path: Path) -> None:
    whole = metrics_of(make_trainer(settings_for(tmp_path / "whole")))
    enough = settings_for(tmp_path / "short", max_generated=whole[2]["tokens/generated"])
    short = metrics_of(make_trainer(enough))
    assert short == whole[:3] and "eval/accuracy" in short[-1]
    assert newest(tmp_path / "short").name == "step_000002"
    timed = metrics_of(make_trainer(settings_for(tmp_path / "time", max_seconds=1e-9)))
    assert len(timed) == 2 and timed[1].items() >= whole[1].items() and "eval/accuracy" in timed[1]


class Speaking(Scripted):
    """Episodes of one turn, which their environment ends."""

    turns, turn_ends = 2, ()

    def respond(self, prompt, turns):
        return completed_future(None)

    def between(self, turns, messages): ...


def test_an_episode_counts_in_the_step_that_ends_it():
    first, second = (collection_of(Speaking(), InOrder(PROBLEMS), n=2, prompts=1, step=step) for step in (0, 1))
    held = first.generate([(PROBLEMS[0], 2)])
    assert first.metrics()["turns/mean"] == 1.0
    assert second.generate(held) == held and "turns/mean" not in second.metrics()


MINE = """
from grpo_cli.collect.epochs import of_kind

class Rule:
    def __init__(self, *, more):
        self.more, self.shown = more, 0

    def __call__(self, step):
        groups = step.score(step.generate((prompt, step.n) for prompt in step.pick(step.prompts)))
        failed = [group.prompt for group in groups if group.solved == 0]
        step.note("failed", len(failed))
        step.generate((prompt, self.more) for prompt in failed)
        return step.score(step.groups)

    def observe(self, step, groups):
        self.shown += 1
        return {"collect/shown": float(self.shown)}

    def state_dict(self):
        return {"kind": "mine", "shown": self.shown}

    def load_state_dict(self, state):
        self.shown = of_kind(state, "collector", "mine")["shown"]
"""


def test_a_collector_of_one_s_own_is_tried_run_resumed_and_profiled(elsewhere: Path) -> None:
    (elsewhere / "mine_collect.py").write_text(MINE)
    words = ["collector._target_=mine_collect.Rule", "n=4", "train.prompts=2", "sampling.max_new_tokens=12"]
    words += ["logger=jsonl", "eval.every=0", "device=cpu"]
    assert "missing a required argument: 'more'" in refused("train", *words, "hydra.run.dir=none")
    assert not (elsewhere / "none").exists()
    words.append("+collector.more=3")
    done("train", *words, "train.steps=2", "hydra.run.dir=run")
    done("train", "train.steps=3", "resume=run")
    message = refused("train", "train.steps=4", "resume=run", "collector=dynamic")
    assert "holds what collector=mine has learnt: resume with it" in message
    rows = json_lines(elsewhere / "run" / "metrics.jsonl")
    assert [(row["step"], row["collect/shown"]) for row in rows[1:]] == [(1, 1), (2, 2), (3, 3)]
    assert any(row["collect/failed"] for row in rows[1:])
    for row in rows[1:]:
        assert row["collect/rounds"] == 1.0 + (row["collect/failed"] > 0)
        assert row["collect/rollouts_max"] == (7.0 if row["collect/failed"] else 4.0)
    done("profile", *words, "profile.steps=1", "profile.warmup=0", "hydra.run.dir=p")
