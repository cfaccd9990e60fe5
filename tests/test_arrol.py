"""Rounds with a limit, rollouts that a collector drops, and `collector=arrol`, which uses both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from bank import Scripted, collection_of
from small import small_model
from test_config import refusal
from test_readout import Counted
from test_resume import rows as records
from test_resume import trained
from test_train import NO_EXAM, Recorder, make_trainer, settings_for

from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.epochs import Epochs
from grpo_cli.collect.rehearsal import rehearsed
from grpo_cli.config.instantiate import make
from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.methods.arrol import Arrol, auc, drawn
from grpo_cli.rules.ridge import ProbeRows
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import (
    EngineStats,
    Finish,
    Group,
    GroupRequest,
    Prompt,
    Readout,
    Request,
    Rollout,
    Round,
    ScoredGroup,
)

PROBLEMS = [Prompt(f"q{i}", (i, 1), "") for i in range(40)]
LONGEST, AT = 8, 3


class Growing(Scripted):
    """Sample s of a problem has s + 1 tokens: the numbers 10, 11, ..."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        self.rounds.append(list(requests))
        for request in requests:
            size, start = request.sample + 1 - request.resumed, 10 + request.resumed
            most = request.sampling.max_new_tokens
            assert most > 0, "an engine is not asked for nothing"
            tokens = tuple(range(start, start + min(size, most)))
            finish = Finish.EOS if size <= most else Finish.LENGTH
            yield Rollout(request, tokens, (-1.0,) * len(tokens), finish, 0)

    def stats(self) -> EngineStats:
        return EngineStats(decode_steps=1, slots=1, slot_utilisation=1.0)


def step_of(engine: Any, n: int = 8, prompts: int = 1, step: int = 4, longest: int = LONGEST) -> StepCollection:
    order = Epochs(PROBLEMS, prompts, 7)
    return collection_of(engine, order, n=n, prompts=prompts, step=step, sampling=Sampling.plain(longest))


def arrol(**changed: Any) -> Arrol:
    rule = make("collector", made.part("collector", "arrol", **{"warmup": 0, "min_rollouts": 4} | changed), {})
    assert isinstance(rule, Arrol)
    return rule


def lengths(groups: Sequence[Any]) -> list[dict[int, int]]:
    return [{r.request.sample: len(r) for r in group.rollouts} for group in groups]


# A round with a limit


def test_what_reaches_the_limit_comes_back_partial_and_goes_on_as_itself() -> None:
    seen: list[Sequence[Group]] = []

    def collector(collection: Collection) -> Rounds:
        asked = tuple(GroupRequest(prompt, 8) for prompt in collection.pick(1))
        seen.append((yield Round(asked, limit=AT)))
        seen.append((yield Round(resumed=tuple(seen[0]), limit=5)))
        seen.append((yield Round(resumed=tuple(seen[1]))))
        return None

    engine = Growing()
    collection = step_of(engine)
    groups = collection.run(collector, engine)
    for limit, found in zip((AT, 5, LONGEST), seen, strict=True):
        rollouts = found[0].rollouts
        assert [len(one) for one in rollouts] == [min(s + 1, limit) for s in range(8)]
        partial = [one.finish is Finish.PARTIAL for one in rollouts]
        assert partial == [s + 1 > limit for s in range(8)], "one that ends at the limit has ended"
        assert {one.request.sampling.max_new_tokens for one in rollouts} == {LONGEST}
    assert [one.token_ids for one in groups[0].rollouts] == [tuple(range(10, 11 + s)) for s in range(8)]
    assert not any(r.request.held_out for r in groups[0].rollouts)
    first, second, third = engine.rounds
    assert not any(request.teaches_length for request in (*first, *second, *third)), "cut lengths teach none"
    assert [len(asked) for asked in engine.rounds] == [8, 5, 3]


def test_a_rollout_that_is_longer_than_the_limit_waits() -> None:
    def collector(collection: Collection) -> Rounds:
        groups = yield Round(tuple(GroupRequest(p, 8) for p in collection.pick(1)), limit=5)
        groups = yield Round((), tuple(groups), limit=AT)
        assert lengths(groups)[0][7] == 5
        yield Round(resumed=tuple(groups))
        return None

    engine = Growing()
    assert lengths(step_of(engine).run(collector, engine)) == [{s: s + 1 for s in range(8)}]


@pytest.mark.parametrize(("limit", "enough"), [(0, None), (LONGEST, None), (AT, 1)])
def test_a_limit_that_cannot_be_is_refused(limit: int, enough: int | None) -> None:
    def collector(collection: Collection) -> Rounds:
        yield Round(tuple(GroupRequest(p, 8) for p in collection.pick(1)), limit=limit, enough=enough)
        return None

    with pytest.raises(UserError, match=rf"round 1 of the collector stops rollouts at limit={limit} tokens: it has to"):
        step_of(Growing()).run(collector, Growing())


# What a collector drops


def test_what_is_dropped_is_neither_judged_nor_trained_on_and_its_number_does_not_come_again() -> None:
    def collector(collection: Collection) -> Rounds:
        (group,) = yield Round(tuple(GroupRequest(p, 5) for p in collection.pick(1)), limit=AT)
        collection.drop([Group(group.prompt, group.rollouts[4:])])
        (group,) = yield Round((GroupRequest(group.prompt, 2),), (Group(group.prompt, (group.rollouts[3],)),))
        assert [r.request.sample for r in group.rollouts] == [0, 1, 2, 3, 5, 6]
        return None

    engine = Growing()
    collection = step_of(engine)
    groups = collection.run(collector, engine)
    assert lengths(groups) == lengths(collection.made) == [{s: s + 1 for s in (0, 1, 2, 3, 5, 6)}]
    assert [request.sample for request in engine.judged] == [0, 1, 2, 3, 5, 6]
    assert collection.metrics()["collect/rollouts_max"] == 6.0


def test_a_problem_of_which_all_is_dropped_is_gone() -> None:
    def collector(collection: Collection) -> Rounds:
        groups = yield Round(tuple(GroupRequest(p, 8) for p in collection.pick(2)), limit=1)
        collection.drop([replace(groups[0], rollouts=groups[0].rollouts[1:])])
        rest = Group(groups[1].prompt, groups[1].rollouts[1:])
        yield Round(resumed=(rest,))
        return None

    engine = Growing()
    assert [len(group.rollouts) for group in step_of(engine, prompts=2).run(collector, engine)] == [1, 8]


@pytest.mark.parametrize("which", [0, 7])
def test_only_partial_rollouts_of_the_step_are_dropped(which: int) -> None:
    def collector(collection: Collection) -> Rounds:
        (group,) = yield Round(tuple(GroupRequest(p, 8) for p in collection.pick(1)), limit=AT)
        one = [Group(group.prompt, (group.rollouts[which],))]
        collection.drop(one)
        collection.drop(one)
        return None

    with pytest.raises(UserError, match=f"the collector drops sample {which} of problem .* drop only those"):
        step_of(Growing()).run(collector, Growing())


# The survival rule


def of_perfect_head(mean: float, size: int = 1000) -> tuple[float, float]:
    """How many are kept of a group of which `mean` is known to be right, and the share of right ones in them."""
    right = np.arange(size) < round(mean * size)
    chances = arrol()._chances(right.astype(float))
    return float(chances.mean()), float(chances[right].sum() / chances.sum())


@pytest.mark.parametrize(("mean", "kept", "right"), [(0.3, 0.5, 0.5), (0.5, 0.5, 0.5), (0.1, 0.35, 0.2857)])
def test_who_goes_on_by_a_perfect_head(mean: float, kept: float, right: float) -> None:
    assert of_perfect_head(mean) == pytest.approx((kept, right), abs=1e-4)


def test_where_all_are_alike_nobody_is_divided_by_nothing() -> None:
    assert arrol()._chances(np.zeros(4)).tolist() == [0.25] * 4 == arrol()._chances(np.ones(4)).tolist()
    assert arrol(share=0.5, keep=0.3)._chances(np.full(3, 0.5)).tolist() == pytest.approx([0.3] * 3), (
        "balanced: at random"
    )


def test_at_least_so_many_are_kept() -> None:
    chances, never = np.array([0.1, 0.6, 0.3, 0.2]), np.full(4, 0.99)
    assert drawn(chances, never, 2).tolist() == [False, True, True, False]
    assert drawn(chances, np.array([0.05, 0.99, 0.99, 0.99]), 2).tolist() == [True, True, False, False]
    assert drawn(chances, never, 0).tolist() == [False] * 4 == drawn(chances, never, -1).tolist()
    assert drawn(chances, never, 9).tolist() == [True] * 4


def test_the_area_by_hand() -> None:
    scores, right = np.array([0.9, 0.4, 0.4, 0.1, np.nan]), np.array([1.0, 1.0, 0.0, 0.0, 1.0])
    assert auc(scores, right) == pytest.approx((1 + 1 + 0.5 + 1) / 4)
    assert auc(scores, np.ones(5)) is None and auc(np.full(5, np.nan), right) is None


def test_scores_are_taken_for_the_share_of_right_ones_among_those_like_them() -> None:
    """Of four with a score in [0.2, 0.3) three were right: (3 + 0.25) / 5. Beyond 0 and 1 the outer tenths count."""
    rule = arrol()
    said, right = np.array([0.21, 0.25, 0.28, 0.2, 0.95, np.nan]), np.array([1.0, 1, 1, 0, 0, 1])
    rule._probe.add([ProbeRows(("a",) * 6, np.random.default_rng(0).random((6, 2)), right, said)])
    found = rule._calibrated(np.array([0.22, 0.99, 0.55, 1.7, -3.0]))
    assert found == pytest.approx([3.25 / 5, 0.95 / 2, 0.55, 0.95 / 2, 0.05])


# A step of it


class Read:
    """Features that say how long a rollout will be: the rule learns that longer ones are right."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[str, int, int]]] = []

    def __call__(self, groups: Sequence[Group], reads: Any, layer: Any, last: int) -> Readout:
        assert set(reads) == {"features"} and layer is None and last == 1
        rollouts = [r for group in groups for r in group.rollouts]
        assert all(one.finish is Finish.PARTIAL for one in rollouts)
        self.rows.append([(r.request.prompt.id, r.request.sample, len(r)) for r in rollouts])
        features = torch.tensor([[float(r.request.sample), 1.0] for r in rollouts])
        return Readout(torch.zeros(len(rollouts), 1), features=features)


def steps_of(rule: Arrol, count: int, n: int = 16) -> tuple[list[list[ScoredGroup]], list[Growing], list[Any], Read]:
    """Steps in which samples of 12 tokens or more are right, and what `observe` says of each."""
    read, found, engines, metrics = Read(), [], [], []
    for step in range(count):
        engine = Growing(lambda request: request.sample >= 11)
        collection = step_of(engine, n=n, prompts=3, step=step, longest=20)
        collection._read = read
        found.append(collection.run(rule, engine))
        engines.append(engine)
        metrics.append(dict(rule.observe(step, found[-1])))
    return found, engines, metrics, read


def test_what_has_not_ended_is_read_and_half_of_it_goes_on_once_something_is_known() -> None:
    found, engines, metrics, read = steps_of(arrol(at=4), 6)
    assert all(len(rows) == 3 * 12 and {size for *_, size in rows} == {4} for rows in read.rows)
    assert lengths(found[0]) == [{s: s + 1 for s in range(16)}] * 3, "nothing is known yet"
    assert metrics[0] == {"prune/kept": 1.0, "prune/saved_tokens": 0.0}
    for groups, engine, said in zip(found[1:], engines[1:], metrics[1:], strict=True):
        left = [r.request.sample for group in groups for r in group.rollouts]
        assert all(set(one) >= set(range(4)) for one in lengths(groups)), "what had ended is there"
        assert all(len(r) == r.request.sample + 1 for group in groups for r in group.rollouts)
        kept = len(left) - 12
        assert said["prune/kept"] == pytest.approx(kept / 36) and 0 < kept < 36
        assert said["prune/saved_tokens"] == pytest.approx((36 - kept) * np.mean([s + 1 - 4 for s in left if s >= 4]))
        assert len(engine.judged) == len(left), "what was dropped is not judged"
        assert len(engine.rounds[1]) == kept
    assert metrics[-1]["prune/auc"] > 0.9, "what it reads says how it ends"


def test_a_warm_up_prunes_nothing_and_learns() -> None:
    found, _, metrics, read = steps_of(arrol(at=4, warmup=3), 4)
    assert [said["prune/kept"] for said in metrics[:3]] == [1.0] * 3 and metrics[3]["prune/kept"] < 1.0
    assert len(read.rows) == 4


def test_at_random_nothing_is_read() -> None:
    found, _, metrics, read = steps_of(arrol(at=4, rule="random", keep=0.25), 8)
    assert read.rows == [] and np.mean([said["prune/kept"] for said in metrics]) == pytest.approx(0.25, abs=0.1)


def test_two_of_a_group_are_left() -> None:
    for groups in steps_of(arrol(at=1, rule="random", keep=0.01), 6)[0]:
        assert all(len(group.rollouts) >= 2 and 0 in one for group, one in zip(groups, lengths(groups), strict=True))


def test_labels_are_of_what_was_seen_to_end() -> None:
    rule = arrol(at=4, window=1)
    found, *_ = steps_of(rule, 3)
    (rows,) = rule._probe.steps
    ended = [r for group in found[-1] for r in group.rollouts if len(r) > 4]
    assert len(rows.targets) == len(ended)
    assert rows.targets.tolist() == [float(r.request.sample >= 11) for r in ended]
    assert rows.features[:, 0].tolist() == [float(r.request.sample) for r in ended]


def test_its_state_comes_back() -> None:
    rule, other = arrol(at=4), arrol(at=4)
    steps_of(rule, 2)
    other.load_state_dict(rule.state_dict())
    features = np.random.default_rng(0).random((5, 2)).astype(np.float32)
    assert np.array_equal(rule._probe.predict(features), other._probe.predict(features))
    other.forget(lambda problem: True)
    assert np.isnan(other._probe.predict(features)).all()


# Whole runs


def groups_of(tmp_path: Path, model: Any, **parts: Any) -> tuple[list[ScoredGroup], Any]:
    settings = replace(settings_for(tmp_path, steps=1), eval=NO_EXAM, sampling=Sampling.plain(24), n=6, m=6)
    seen: list[ScoredGroup] = []
    trainer = make_trainer(settings, model=model, **parts)
    plain = trainer._parts.history.observe
    trainer._parts.history.observe = lambda step, groups: (seen.extend(groups), plain(step, groups))[1]  # type: ignore[method-assign]
    counted = Counted(trainer)
    trainer.fit()
    return seen, counted


def test_survivors_have_the_tokens_that_they_would_have_had(tmp_path: Path) -> None:
    whole, _ = groups_of(tmp_path / "whole", small_model())
    pruned, counted = groups_of(tmp_path / "pruned", small_model(), collector=arrol(at=5, rule="random"))
    first = {(g.prompt.id, r.request.sample): r for g in whole for r in g.rollouts}
    left = [(g.prompt.id, r) for g in pruned for r in g.rollouts]
    assert 6 <= len(left) < len(first) and any(len(rollout) > 5 for _, rollout in left)
    for name, rollout in left:
        own = first[name, rollout.request.sample]
        assert (rollout.token_ids, rollout.finish, rollout.request) == (own.token_ids, own.finish, own.request)
        np.testing.assert_allclose(rollout.sampler_logprobs, own.sampler_logprobs, atol=2e-5)
    assert counted.readouts == [], "at random nothing is read"


def test_a_run_learns_reads_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    words = ["collector=arrol", "collector.at=6", "collector.warmup=1", "collector.min_rollouts=8", "train.prompts=4"]
    words += ["train.checkpoint_every=3", "sampling.max_new_tokens=40", "task.min_terms=2"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    trained(whole, *words, "train.steps=5")
    trained(folder, *words, "train.steps=3")
    trained(folder, *words, "train.steps=5", f"resume={folder}")
    assert records(folder) == records(whole)
    assert any(row.get("prune/kept", 1.0) < 1.0 for row in records(whole)[4:])


def test_what_goes_on_is_read_by_the_runs_own_model(tmp_path: Path) -> None:
    recorder = Recorder()
    _, counted = groups_of(tmp_path, small_model(), collector=arrol(at=5, warmup=9), trackers=(recorder,))
    assert len(counted.readouts) == 1 and 0 < counted.readouts[0] <= 18
    assert recorder.records[-1].metrics["prune/kept"] == 1.0


# What cannot be


def test_a_place_that_is_never_reached_is_refused() -> None:
    said = refusal("collector=arrol", "collector.at=128")
    assert "collector.at=128 is never reached with sampling.max_new_tokens=128" in said


def test_too_few_left_of_a_group_is_refused() -> None:
    said = refusal("collector=arrol", "n=4", "collector.keep=0.4")
    assert "collector.keep=0.4 of n=4 leaves less than 2 rollouts of a problem" in said


def test_parts_that_partial_rollouts_or_unequal_groups_do_not_go_with_are_refused() -> None:
    assert "would count as prompt; use sparsity=dense" in refusal(
        "collector=arrol", "sparsity=snapkv", "correction=sparse_rl"
    )
    assert "leaves groups of any size" in refusal("collector=arrol", "n=9", "advantage=median")
    assert "looks into replies of one turn" in refusal("collector=arrol", "task=guess", "task.turns=4")


@pytest.mark.parametrize("words", ["keep=0", "keep=1.5", "share=2", "warmup=-1", "at=0", "rule=best", "window=0"])
def test_numbers_out_of_range_are_refused(words: str) -> None:
    assert f"collector.{words.partition('=')[0]}=" in refusal("collector=arrol", f"collector.{words}")


def test_a_layer_that_is_not_there_is_refused_before_the_first_rollout(tmp_path: Path) -> None:
    settings = replace(settings_for(tmp_path, steps=1), eval=NO_EXAM)
    with pytest.raises(UserError, match=r"layer=7 cannot be read: the model's are 1 to 2"):
        make_trainer(settings, model=small_model(), collector=arrol(at=3, layer=7))


def test_a_rehearsal_sees_what_it_goes_on_with() -> None:
    size = rehearsed(arrol(), n=8, prompts=3, longest=16)
    assert (size.rounds, size.resumed, size.partial) == (2, True, False)
    assert (size.at_once, size.rollouts, size.trained) == (24, 36, 24)
