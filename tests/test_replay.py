"""Groups that are trained on again: which are stored, drawn and dropped, and what a step, a record and a checkpoint
make of them."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from small import describe
from test_resume import HELD, WORDS, cut_off_and_resumed, kill_and_resume, records, rows, trained
from test_seams import Spy, quiet
from test_train import CountTask, Recorder, make_trainer, settings_for

from grpo_cli.collect.equal import equal
from grpo_cli.collect.replay import NoReplay
from grpo_cli.collect.stored import from_plain, to_plain
from grpo_cli.config.check import check
from grpo_cli.config.compose import settings_of
from grpo_cli.config.instantiate import ready
from grpo_cli.config.prepare import prepare
from grpo_cli.experiment import replay_of, set_up
from grpo_cli.interfaces import Bench, Collection, Remembers, Replay, Rounds
from grpo_cli.learner.batch import collate, corrected, verdict_on
from grpo_cli.methods.dots import GroupStore
from grpo_cli.methods.sapo import RunFolder
from grpo_cli.metrics import replay_metrics, reuse_metrics
from grpo_cli.runs.checkpoint import load_state
from grpo_cli.select import Selection
from grpo_cli.settings import RecordSettings, Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.tracking.examples import examples
from grpo_cli.types import FOREIGN, GIVEN, Finish, Prompt, Request, Reward, Rollout, ScoredGroup, Span

SAMPLING = Sampling.plain(8)


def group(name: str, rewards: Sequence[float] = (1.0, 0.0), version: int = 0, logprob: float = -1.0) -> ScoredGroup:
    """Of rollouts of two tokens each."""
    prompt = Prompt(name, (1, 3), "x")
    requests = [Request(prompt, sample, 2**64 - 1 - sample, SAMPLING) for sample in range(len(rewards))]
    rollouts = tuple(
        Rollout(r, (4, 5 + r.sample), (logprob,) * 2, Finish.EOS, 2, (Span(version, 2),)) for r in requests
    )
    return ScoredGroup(prompt, rollouts, tuple(Reward(r, {"correct": r}, weights={"correct": 1.0}) for r in rewards))


def store(*groups: ScoredGroup, **changed: Any) -> GroupStore:
    made_now: GroupStore = ready("replay", "fifo", **changed)
    made_now.observe(0, groups)
    return made_now


def drawn(replay: Any, count: int, fresh: Sequence[ScoredGroup] = (), seed: int = 0) -> list[ScoredGroup]:
    return list(replay.draw(count, fresh, 1, np.random.default_rng(seed)))[len(fresh) :]


def names(groups: Sequence[ScoredGroup]) -> list[str]:
    return [one.prompt.id for one in groups]


def held(replay: GroupStore) -> list[str]:
    """From the oldest to the newest."""
    return [kept["prompt"][0] for kept in replay.state_dict()["stored"]]


# What is stored, and drawn


def test_a_group_comes_back_from_plain_values_as_it_was() -> None:
    given = replace(group("a").rollouts[0], sampler_logprobs=(math.nan, -0.5), spans=(Span(GIVEN, 1), Span(3, 1)))
    whole = replace(group("a"), rollouts=(given, replace(given, token_ids=(), sampler_logprobs=(), spans=())))
    again = from_plain(to_plain(whole))
    assert math.isnan(again.rollouts[0].sampler_logprobs[0]) and again.rollouts[0].sampler_logprobs[1] == -0.5
    known = [replace(r, sampler_logprobs=()) for r in again.rollouts]
    assert known == [replace(r, sampler_logprobs=()) for r in whole.rollouts]
    assert (again.prompt, again.rewards) == (whole.prompt, whole.rewards)


def test_the_newest_group_of_a_problem_stays_and_the_oldest_problems_go() -> None:
    replay = store(group("a"), group("b"), group("c"), capacity=3)
    replay.observe(1, [group("a", version=1), group("d", version=1)])
    assert held(replay) == ["c", "a", "d"]
    (of_a,) = (one for one in drawn(replay, 3) if one.prompt.id == "a")
    assert of_a == group("a", version=1)


def test_groups_of_equal_rewards_are_not_stored_and_leave_what_is_there() -> None:
    replay = store(group("a"), group("b", (1.0, 1.0)), group("c", (0.0, 0.0)))
    replay.observe(1, [group("a", (1.0, 1.0), version=1)])
    assert drawn(replay, 1) == [group("a")] and held(replay) == ["a"]


def test_a_share_of_the_problems_is_asked_anew_and_more_while_the_store_is_too_small() -> None:
    replay = store(fresh=0.1)
    assert replay.fresh(30, 0) == 30, "nothing is stored"
    replay.observe(0, [group(str(i)) for i in range(4)])
    assert [replay.fresh(prompts, 0) for prompts in (30, 10, 5, 1)] == [26, 6, 1, 1]
    replay.observe(1, [group(str(i)) for i in range(40)])
    assert replay.fresh(30, 0) == 3, "and not 4, as in floating point"


def test_groups_are_drawn_once_each_alike_and_other_problems_before_those_of_the_step() -> None:
    replay = store(*(group(name) for name in "abcdef"))
    assert sorted(names(drawn(replay, 6))) == [*"abcdef"], "none comes twice"
    counts = dict.fromkeys("abcdef", 0)
    for seed in range(600):
        for name in names(drawn(replay, 2, seed=seed)):
            counts[name] += 1
    assert min(counts.values()) > 150 and max(counts.values()) < 250  # 200 expected, 5 deviations
    anew = [group("a", version=1), group("b", version=1)]
    for seed in range(20):
        assert not {"a", "b"} & set(names(drawn(replay, 4, anew, seed)))
    assert len(drawn(replay, 5, anew)) == 5, "where there are no others they come all the same"
    assert drawn(replay, 3, seed=7) == drawn(replay, 3, seed=7)


def test_groups_whose_oldest_token_is_too_old_are_dropped() -> None:
    mixed = group("b", version=5)
    mixed = replace(mixed, rollouts=(replace(mixed.rollouts[0], spans=(Span(2, 1), Span(5, 1))), mixed.rollouts[1]))
    replay = store(group("a", version=4), mixed, group("c", version=5), max_lag=3, fresh=0.25)
    assert (replay.fresh(4, 5), held(replay)) == (1, ["a", "b", "c"])
    assert (replay.fresh(4, 6), held(replay)) == (2, ["a", "c"])
    assert (replay.fresh(4, 9), held(replay)) == (4, [])
    assert store(group("a"), max_lag=None).fresh(2, 10**6) == 1


def test_a_group_without_a_success_gets_a_stored_one_in_place_of_a_failure() -> None:
    replay = store(group("a", (1.0, 0.0, 0.0)), group("b", (0.5, 0.0)), group("d"), rescue=True)
    fresh = [group(name, (0.0, 0.0, 0.0), version=3) for name in "abc"] + [group("d", (0.0, 1.0))]
    rescued = replay.draw(0, fresh, 3, np.random.default_rng(0))
    assert list(rescued[1:]) == fresh[1:], "of b there is no success, of c nothing, and d has one"
    assert [reward.total for reward in rescued[0].rewards].count(1.0) == 1
    (place,) = (i for i, reward in enumerate(rescued[0].rewards) if reward.total)
    assert rescued[0].rollouts[place] == group("a", (1.0, 0.0, 0.0)).rollouts[0]
    assert all(rescued[0].rollouts[i] is fresh[0].rollouts[i] for i in range(3) if i != place)
    places = {
        next(i for i, r in enumerate(replay.draw(0, fresh, 3, np.random.default_rng(seed))[0].rewards) if r.total)
        for seed in range(30)
    }
    assert places == {0, 1, 2}, "any failure may go"
    assert replay.observe(1, [group("a", (0.5, 0.0), version=3)]) == {"replay/rescued": 1.0}
    assert sum(one.solved for one in drawn(replay, 3)) == 2, "a success stays until another comes"
    assert list(store(group("a")).draw(0, fresh, 3, np.random.default_rng(0))) == fresh, "only if it is asked for"


def test_a_store_that_only_rescues_stores_as_well() -> None:
    assert held(store(group("a"), fresh=1.0, rescue=True)) == ["a"]
    assert held(store(group("a"), fresh=1.0, rescue=False)) == [], "nothing would ever be drawn from it"


def test_a_store_comes_back_from_its_state_in_its_order() -> None:
    replay, again = store(*(group(name) for name in "dacb")), store(group("z"))
    again.load_state_dict(replay.state_dict())
    assert held(again) == [*"dacb"] and drawn(again, 3, seed=5) == drawn(replay, 3, seed=5)
    smaller = store(capacity=2)
    smaller.load_state_dict(replay.state_dict())
    assert held(smaller) == ["c", "b"]
    assert isinstance(replay, Remembers) and not isinstance(NoReplay(), Remembers)


# What a step makes of them


def test_the_ratio_is_to_the_policy_that_drew_a_token() -> None:
    """A group of version 2 with log-probability -2 beside one of version 5 with -1; the policy now says -1 of all."""
    batch = collate([group("a", version=5), group("b", version=2, logprob=-2.0)], 0, 5)
    verdict = verdict_on(made.correction("decoupled"), batch, torch.full(batch.weights.shape, -1.0))
    weights = corrected(batch, verdict).weights
    assert weights[:2, 2:].tolist() == [[1.0, 1.0]] * 2
    assert weights[2:, 2:].flatten().tolist() == pytest.approx([math.e] * 4)
    assert reuse_metrics(batch) == {
        "off/token_share": 0.5,
        "off/lag_mean": 1.5,
        "off/lag_max": 3.0,
        "off/given_share": 0.0,
    }


def test_tokens_of_other_runs_are_old_without_an_age() -> None:
    foreign, given = group("a", version=FOREIGN), group("b", version=GIVEN, logprob=math.nan)
    batch = collate([foreign, given, group("c", version=1)], 0, 3)
    shares = reuse_metrics(batch)
    assert (shares["off/token_share"], shares["off/given_share"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert (shares["off/lag_mean"], shares["off/lag_max"]) == (2.0, 2.0)
    assert batch.drawn_mask[:2].sum() == 4 and not batch.drawn_mask[2:4].any()
    assert replay_metrics([foreign, given], 3) == {"replay/groups": 2.0}
    assert replay_metrics([foreign, group("c", version=1)], 3) == {"replay/groups": 2.0, "replay/age_mean": 2.0}
    assert replay_metrics([], 3) == {}
    assert all(describe(name) for name in ("replay/groups", "replay/age_mean", "replay/rescued", "replay/own"))


class Alternating(CountTask):
    """Every second sample is right, so that every group teaches."""

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return Reward(float(rollout.request.sample % 2))


class Watched(GroupStore):
    """A store that keeps what it was asked and has answered."""

    def __init__(self) -> None:
        super().__init__(fresh=0.5, capacity=512, max_lag=None, rescue=False)
        self.steps: list[tuple[list[str], list[ScoredGroup]]] = []
        self.observed: list[list[str]] = []

    def draw(self, count: int, fresh: Sequence[ScoredGroup], version: int, rng: Any) -> Sequence[ScoredGroup]:
        groups = super().draw(count, fresh, version, rng)
        self.steps.append((names(fresh), list(groups[len(fresh) :])))
        assert all(span.version < version for g in groups[len(fresh) :] for r in g.rollouts for span in r.spans)
        return groups

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        self.observed.append(names(groups))
        return super().observe(step, groups)


def test_a_step_has_its_number_of_groups_and_generates_the_new_ones_alone(tmp_path: Path) -> None:
    spy, recorder, replay = Spy(), Recorder(), Watched()
    settings = quiet(
        settings_for(tmp_path, steps=4),
        record=RecordSettings(rollouts=-1, tokens=False, gauges=(), gauge_every=10),
        m=2,
    )
    parts = {"task": Alternating(), "loss": spy, "trackers": (recorder,), "replay": replay}
    trainer = make_trainer(settings, **parts, downsample=made.downsample("maxvar"))
    trainer.fit()
    assert [len(fresh) for fresh, _ in replay.steps] == [3, 2, 2, 2], "of 3 problems, ceil(1.5) are asked anew"
    assert [len(old) for _, old in replay.steps] == [0, 1, 1, 1]
    assert replay.observed == [fresh for fresh, _ in replay.steps]
    assert [len(batch) for batch in spy.batches] == [6] * 4, "two of four rollouts of each group, replayed ones too"
    told = [record.metrics for record in recorder.records[1:]]
    generated = [metrics["tokens/generated"] for metrics in told]
    lengths = [sum(row.length for row in record.examples) for record in recorder.records[1:]]
    assert np.diff([0, *generated]).tolist() == lengths, "what is replayed costs nothing, and has its row already"
    assert [metrics["rollouts/generated"] for metrics in told] == [12, 20, 28, 36]
    assert [metrics.get("replay/groups") for metrics in told] == [None, 1.0, 1.0, 1.0]
    assert told[1]["replay/age_mean"] == 1.0 and 0 < told[1]["off/token_share"] < 1
    assert told[3]["group/mixed"] == 2.0 and told[3]["collect/problems"] == 2.0
    seen = trainer._parts.history
    visited = {name for fresh, _ in replay.steps for name in fresh}
    assert sum(len(seen.visits(name)) for name in visited) == 9, "the history is told of new groups alone"


def test_the_log_probabilities_of_a_replayed_group_are_those_that_it_was_drawn_with(tmp_path: Path) -> None:
    spy, replay = Spy(), Watched()
    settings = quiet(settings_for(tmp_path, steps=3))
    make_trainer(settings, task=Alternating(), loss=spy, replay=replay).fit()
    for batch, (_, (old,)) in zip(spy.batches[1:], replay.steps[1:], strict=True):
        assert batch.lags is not None
        aged = (batch.lags > 0).any(dim=1)  # a micro-batch has its rows by their length
        found = [row[mask].tolist() for row, mask in zip(batch.sampler_logprobs, batch.response_mask, strict=True)]
        expected = sorted(rollout.sampler_logprobs for rollout in old.rollouts)
        assert sorted(tuple(one) for one, is_old in zip(found, aged, strict=True) if is_old) == expected


def test_what_a_stored_success_took_the_place_of_is_recorded_as_it_was() -> None:
    fresh = group("a", (0.0, 0.0), version=3)
    (rescued,) = store(group("a", (1.0, 0.0)), rescue=True).draw(0, [fresh], 3, np.random.default_rng(0))
    selection = Selection(rescued, (0, 1), torch.tensor([0.5, -0.5]), ("", ""))
    replayed = Selection(group("b"), (0, 1), torch.tensor([1.0, -1.0]), ("", ""))
    told = examples(CountTask(), [fresh], [selection, replayed], -1)
    assert [(row.prompt_id, row.sample, row.reward) for row in told] == [("a", 0, 0.0), ("a", 1, 0.0)]
    assert sorted((row.kept, row.reason) for row in told) == [
        (False, "a stored rollout took its place"),
        (True, "kept"),
    ]
    assert sorted(row.advantage is None for row in told) == [False, True]


class Drawing(NoReplay):
    """Keeps the first number of the stream that it is given in each step."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def draw(self, count: int, fresh: Sequence[ScoredGroup], version: int, rng: Any) -> Sequence[ScoredGroup]:
        self.numbers.append(int(rng.integers(2**62)))
        return fresh


def test_every_step_draws_from_the_store_with_a_stream_of_its_own(tmp_path: Path) -> None:
    replay, again, rounds = Drawing(), Drawing(), list[int]()

    def collector(collection: Collection) -> Rounds:
        rounds.append(int(collection.rng.integers(2**62)))
        return (yield from equal(collection))

    settings = quiet(settings_for(tmp_path / "a", steps=3))
    make_trainer(settings, replay=replay, collector=collector).fit()
    make_trainer(replace(settings, run_dir=str(tmp_path / "b")), replay=again).fit()
    assert len({*replay.numbers, *rounds}) == 6, "and none of the collector's"
    assert again.numbers == replay.numbers


class OfOnesOwn(NoReplay):
    """Answers as it is told."""

    def __init__(self, fresh: Any = 3, keeps: int = 9) -> None:
        self._fresh, self._keeps = fresh, keeps

    def fresh(self, prompts: int, version: int) -> Any:
        return self._fresh

    def draw(self, count: int, fresh: Sequence[ScoredGroup], version: int, rng: Any) -> Sequence[ScoredGroup]:
        return fresh[: self._keeps]


@pytest.mark.parametrize(
    ("replay", "said"),
    [
        (OfOnesOwn(fresh=0), r"replay: fresh\(prompts=3, version=0\) answered 0: .* from 1 to 3"),
        (OfOnesOwn(fresh=4), "answered 4"),
        (OfOnesOwn(fresh=1.5), "answered 1.5"),
        (OfOnesOwn(keeps=2), r"replay: draw\(count=0, fresh, ...\) answered .* do not begin with the 3 of fresh"),
    ],
)
def test_a_replay_of_ones_own_that_loses_groups_is_records(tmp_path: Path, replay: Replay, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_trainer(quiet(settings_for(tmp_path, steps=1)), replay=replay).fit()


def test_a_replay_of_ones_own_needs_two_methods_and_may_remember(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "my_replay.py").write_text(
        "from grpo_cli.methods.dots import GroupStore\n"
        "class Nothing:\n    pass\n"
        "class Mine(GroupStore):\n"
        "    def __init__(self, seed):\n"
        "        super().__init__(fresh=0.5, capacity=seed + 4, max_lag=None, rescue=False)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    trained(tmp_path / "mine", *ALL, "replay._target_=my_replay.Mine")
    assert rows(tmp_path / "mine")[-1]["replay/groups"] == 1.0
    with pytest.raises(UserError, match="replay: my_replay.Nothing has no fresh, draw; see grpo_cli.interfaces.Replay"):
        trained(tmp_path / "nothing", *ALL, "replay._target_=my_replay.Nothing")


# Whole runs


# Sums that fit, of which some answers are right and some wrong.
EASY = ("task.train_problems=512", "task.eval_problems=20", "task.max_terms=2", "sampling.temperature=2", "n=8")
ALL = ("record.rollouts=-1", "optim.lr=1e-3", *EASY)


def test_a_run_that_asks_all_problems_anew_is_a_plain_one_to_the_bit(tmp_path: Path) -> None:
    trained(tmp_path / "none", *ALL)
    trained(tmp_path / "fifo", *ALL, "replay=fifo", "replay.fresh=1")
    assert records(tmp_path / "fifo") == records(tmp_path / "none")


def test_a_run_goes_on_with_its_store_from_a_checkpoint(tmp_path: Path) -> None:
    words = (*ALL, "replay=fifo", "correction=decoupled", "train.steps=4")
    cut_off_and_resumed(tmp_path, *words, step=4)
    assert load_state(tmp_path / "alone" / "checkpoints" / "step_000002")["rules"]["replay"]["stored"]
    assert [row.get("replay/groups") for row in rows(tmp_path / "alone")][2:] == [1.0] * 3
    resume = f"resume={tmp_path / 'cut'}"
    with pytest.raises(UserError, match="holds what replay=fifo has learnt, and this run's replay learns nothing"):
        trained(tmp_path / "cut", *words, resume, "replay=none", "train.steps=5")


@pytest.mark.process
def test_kill_9_and_resume_loses_no_stored_group(tmp_path: Path) -> None:
    held_up = (HELD, "advantage._target_=held.advantage", "outputs/train/killed/checkpoints/step_000002/COMPLETE")
    words = (*WORDS, *ALL, "replay=fifo", "replay.rescue=true", "correction=decoupled", "task.train_problems=12")
    kill_and_resume(tmp_path, words, *held_up)
    assert rows(tmp_path / "alone")[-1]["replay/groups"] == 1.0


# Records of other runs


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the same problems."""
    folder = tmp_path_factory.mktemp("others")
    recorded = (*ALL, "record.tokens=true", "optim.lr=1e-2")
    trained(folder / "one", *recorded)
    trained(folder / "two", *recorded, "seed=1", "+task.seed=0")
    return folder


FROM = ("replay=folder", "replay.foreign=0.5", "correction=ftis")


def test_two_runs_teach_a_third(others: Path, tmp_path: Path) -> None:
    words = (*ALL, *FROM, f"replay.path={others}", "train.steps=4")
    cut_off_and_resumed(tmp_path, *words, step=4)
    said = rows(tmp_path / "alone")[1:]
    assert [row["replay/groups"] for row in said] == [1.0] * 4 and "replay/age_mean" not in said[0]
    assert all(0 < row["off/token_share"] < 1 and row["off/given_share"] == 0 for row in said)  # type: ignore[operator]
    assert [row["rollouts/generated"] for row in said] == [8.0, 16.0, 24.0, 32.0]
    assert any(row["mismatch/ratio_mean"] != 1.0 for row in said if "mismatch/ratio_mean" in row)


def opened(path: Path, warnings: list[str] | None = None, **changed: Any) -> RunFolder:
    """A folder of other runs, for a run of the embedded task that makes rollouts of up to 12 tokens."""
    settings = settings_of(*WORDS, *EASY, "replay=folder", f"replay.path={path}", f"run_dir={path / 'own'}")
    settings = replace(settings, parts={**settings.parts, "replay": {**settings.parts["replay"], **changed}})
    made_now = replay_of(settings, bench(), (warnings if warnings is not None else []).append)
    assert isinstance(made_now, RunFolder)
    return made_now


@functools.cache
def bench() -> Bench:
    settings = settings_of(*WORDS, *EASY)
    return set_up(prepare(settings), settings.model)


def every(replay: RunFolder) -> list[ScoredGroup]:
    return drawn(replay, len(replay._groups))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def put(folder: Path, lines: Sequence[Mapping[str, Any] | str], end: str = "\n") -> Path:
    """A record of these lines below `folder`."""
    folder.mkdir(exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "rollouts.jsonl").write_text("\n".join(texts) + end)
    return folder


@pytest.fixture
def record(others: Path) -> list[dict[str, Any]]:
    """The rows of a group that teaches."""
    some = lines_of(others / "one")
    of = {(row["step"], row["prompt_id"]): [] for row in some}  # type: ignore[var-annotated]
    for row in some:
        of[row["step"], row["prompt_id"]].append(row)
    return next(rows for rows in of.values() if len({row["reward"] for row in rows}) > 1)


def test_a_recorded_group_is_what_its_run_has_drawn(record: list[dict[str, Any]], tmp_path: Path) -> None:
    warnings: list[str] = []
    (found,) = every(opened(put(tmp_path, record), warnings))
    assert [list(r.token_ids) for r in found.rollouts] == [row["token_ids"] for row in record]
    assert [r.sampler_logprobs for r in found.rollouts] == [pytest.approx(row["logprobs"]) for row in record]
    assert [reward.total for reward in found.rewards] == [row["reward"] for row in record]
    assert {span.version for r in found.rollouts for span in r.spans} == {FOREIGN} and not warnings


def test_tokens_without_log_probabilities_count_as_given(record: list[dict[str, Any]], tmp_path: Path) -> None:
    plain = [{k: v for k, v in row.items() if k not in ("token_ids", "logprobs")} for row in record]
    warnings: list[str] = []
    (found,) = every(opened(put(tmp_path, plain), warnings))
    assert [list(r.token_ids) for r in found.rollouts] == [row["token_ids"] for row in record]
    assert all(math.isnan(said) for r in found.rollouts for said in r.sampler_logprobs)
    assert {span.version for r in found.rollouts for span in r.spans} == {GIVEN}
    assert "1 of the 1 groups have no log-probabilities of this tokenizer" in warnings[0]
    (again,) = every(opened(put(tmp_path, record), reencode=True))
    assert [r.token_ids for r in again.rollouts] == [r.token_ids for r in found.rollouts]
    some = [{**row, "logprobs": [None, *row["logprobs"][1:]]} for row in record]
    (mixed,) = every(opened(put(tmp_path, some)))
    assert mixed.rollouts[0].spans[0] == Span(GIVEN, 1) and mixed.rollouts[0].spans[1].version == FOREIGN


def test_a_record_that_is_being_written_is_read_up_to_its_last_whole_group(
    record: list[dict[str, Any]], tmp_path: Path
) -> None:
    later = [{**row, "step": row["step"] + 1} for row in record]
    put(tmp_path, [*record, *later[:5], json.dumps(later[5])[:40]], end="")
    replay = opened(tmp_path)
    assert len(every(replay)) == 1
    state = replay.state_dict()
    put(tmp_path, [*record, *later])
    assert len(every(opened(tmp_path))) == 2
    again = opened(tmp_path)
    again.load_state_dict(state)
    assert every(again) == every(replay), "a run that goes on has what it had"
    put(tmp_path, [*later, *record])
    with pytest.raises(UserError, match="is not what this run has replayed: its first [0-9]+ bytes have changed"):
        again.load_state_dict(state)


def test_only_groups_of_this_task_that_teach_and_fit_are_taken(record: list[dict[str, Any]], tmp_path: Path) -> None:
    def as_step(step: int, **changed: Any) -> list[dict[str, Any]]:
        return [{**row, "step": step, **changed} for row in record]

    others = [as_step(2, prompt="1+1="), as_step(3, prompt_id="train-x"), as_step(4, answer="-1"), as_step(5, reward=1)]
    put(tmp_path, [*record, *(row for rows in others for row in rows)])
    assert len(every(opened(tmp_path))) == 1
    for left_out, why in ((others[0], "1 of other problems"), (others[3], "1 of equal rewards")):
        put(tmp_path, left_out)
        with pytest.raises(UserError, match=f"holds nothing to train on: 1 groups.*{why}"):
            opened(tmp_path)
    long = [{**row, "token_ids": row["token_ids"][:1] * 13, "logprobs": [-1.0] * 13} for row in record]
    put(tmp_path, [{**row, "reply": row["reply"][:1] * 13, "finish": "length"} for row in long])
    with pytest.raises(UserError, match="1 with more tokens than sampling.max_new_tokens"):
        opened(tmp_path)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "another tokenizer": ({"reply": "9"}, "its token ids do not read as its reply here: .* another tokenizer; replay"),
    "no token": ({"token_ids": [10**6], "logprobs": [-1.0]}, "token 1000000 does not exist in this run's vocabulary"),
    "negative": ({"token_ids": [-1], "logprobs": [-1.0]}, "token -1 does not exist in this run's vocabulary"),
    "words": ({"token_ids": ["a"]}, "its token ids are no list of whole numbers"),
    "too few": ({"logprobs": [-1.0] * 40}, "its log-probabilities are not one for each of its"),
    "above 0": ({"token_ids": [3], "logprobs": [2.0]}, "its log-probabilities are not one for each of its 1 tokens"),
    "none": ({"logprobs": None}, "its log-probabilities are not one for each of its"),
    "reward": ({"reward": "NaN"}, "does not say a reward, and how the rollout ended"),
    "finish": ({"finish": "partial"}, "does not say a reward, and how the rollout ended"),
    "parts": ({"parts": {"correct": "much"}}, "the parts of its reward are no finite numbers"),
    "id": ({"prompt_id": 7}, "does not say prompt_id: it is no rollouts.jsonl of a run"),
    "step": ({"step": None}, "does not say step: it is no rollouts.jsonl of a run"),
    "gap": ({"sample": 99}, "holds the samples .*99.* alone, and groups are trained on whole; let runs record with"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_line_that_cannot_be_is_named(name: str, record: list[dict[str, Any]], tmp_path: Path) -> None:
    changed, said = BROKEN[name]
    put(tmp_path, [*record[:-1], {**record[-1], **changed}])
    with pytest.raises(UserError, match=said):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "line 1 of .*rollouts.jsonl is no JSON"),
        (["[" * 100_000], "line 1 of .*rollouts.jsonl is no JSON"),
        (["[]"], "line 1 of .* does not say prompt_id, prompt, reply, answer, finish, step, sample"),
        ([], "holds nothing to train on: 0 groups"),
    ],
)
def test_a_record_that_is_none_is_refused(lines: list[str], said: str, tmp_path: Path) -> None:
    put(tmp_path, lines, end="\n" if lines else "")
    with pytest.raises(UserError, match=said):
        opened(tmp_path)


def test_a_folder_without_records_of_others_is_refused(record: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no rollouts.jsonl of another run"):
        opened(tmp_path)
    put(tmp_path / "own", record)
    with pytest.raises(UserError, match="holds no rollouts.jsonl of another run"):
        opened(tmp_path)
    put(tmp_path / "other", record)
    replay = opened(tmp_path)
    state = replay.state_dict()
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(UserError, match="which replay.path names, cannot be read"):
        replay.load_state_dict(state)


# What is refused before anything is read


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("replay=fifo credit=fresh", "replay=fifo"),
        ("replay=fifo correction.prox=drawn sparsity=snapkv", "sparsity=snapkv"),
        ("replay=folder", "replay.path=<folder of other runs>"),
        ("replay=folder replay.path=/nowhere", "replay.path=/nowhere is not there"),
        (f"replay=folder replay.path={__file__}", "name the folder that test_replay.py is in"),
        ("replay=folder replay.path=/tmp correction.prox=drawn", "replay=folder"),
        ("replay=folder replay.path=/tmp n=9 m=8 downsample=median", "downsample=median"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(words: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        check(settings_of(*words.split()))
    (line,) = refused.value.problems
    assert said in line


def test_a_run_with_a_store_is_predicted_as_a_plain_one() -> None:
    plain, replayed = (settings_of(*words) for words in ((), ("replay=fifo",)))
    assert prepare(replayed).size == prepare(plain).size, "its first step is one, and the largest"
