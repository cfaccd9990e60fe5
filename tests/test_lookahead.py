"""collector=lookahead: trees of rollouts, on a scripted engine and a whole run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from bank import Scripted, collection_of
from test_config import refusal
from test_resume import rows as records
from test_resume import trained

from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.epochs import Epochs
from grpo_cli.config.instantiate import rule_of
from grpo_cli.methods.latr import edit_distance
from grpo_cli.settings import Sampling
from grpo_cli.types import GIVEN, EngineStats, Finish, Group, Prompt, Readout, Request, Rollout

PROBLEMS = [Prompt(f"q{i}", (i, 1), "") for i in range(40)]
LONGEST, EOS = 24, 99


class Spelled(Scripted):
    """The tokens of sample s: 100 s + their place, unless `same`: then their place. All have LONGEST of them, but for
    those that `ends` says end sooner."""

    def __init__(self, same: bool = False, ends: Any = ()) -> None:
        super().__init__(lambda request: True)
        self.same, self.ends = same, dict(ends)

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        self.rounds.append(list(requests))
        for request in requests:
            start, most = request.resumed, request.sampling.max_new_tokens
            whole = self.ends.get(request.sample, LONGEST + 1)
            tokens = [place + (0 if self.same else 100 * request.sample) for place in range(start, start + most)]
            ended = whole <= start + most
            tokens = tokens[: max(whole - start, 1)] if ended else tokens
            yield Rollout(request, tuple(tokens), (-1.0,) * len(tokens), Finish.EOS if ended else Finish.LENGTH, 0)

    def stats(self) -> EngineStats:
        return EngineStats(decode_steps=1, slots=1, slot_utilisation=1.0)


class Hesitates:
    """A readout in which the policy hesitates at some places, between the token that was taken and `other`."""

    def __init__(self, places: Sequence[int], other: int = 7, probs: tuple[float, float] = (0.5, 0.4)) -> None:
        self.places, self.other, self.probs, self.asked = places, other, probs, list[list[tuple[int, int]]]()

    def __call__(self, groups: Sequence[Group], reads: Any, layer: Any, last: int) -> Readout:
        assert set(reads) == {"top"}
        rollouts = [r for group in groups for r in group.rollouts]
        self.asked.append([(r.request.sample, len(r)) for r in rollouts])
        width = 2 + max(map(len, rollouts))
        ids, probs = torch.zeros(len(rollouts), width, 2, dtype=torch.long), torch.zeros(len(rollouts), width, 2)
        probs[..., 0] = 1.0
        for row, rollout in enumerate(rollouts):
            for place, token in enumerate(rollout.token_ids):
                ids[row, 2 + place] = torch.tensor([token, self.other])
                if place in self.places:
                    probs[row, 2 + place] = torch.tensor(self.probs)
        return Readout(torch.zeros(len(rollouts), width), top_ids=ids, top_probs=probs)


def grown(
    read: Hesitates, engine: Spelled | None = None, n: int = 4, step: int = 0, prompts: int = 1, **changed: Any
) -> tuple[list[Any], StepCollection, Spelled]:
    words = {"chunk": 4, "prune_after": [3], "hand_over": 12} | changed
    engine = engine or Spelled()
    order = Epochs(PROBLEMS, prompts, 7)
    sampling = Sampling.plain(LONGEST)
    collection = collection_of(engine, order, n=n, prompts=prompts, step=step, sampling=sampling)
    collection._read, collection.ends = read, frozenset({EOS})
    groups = collection.run(rule_of("collector", made.part("collector", "lookahead", **words)), engine)
    return groups, collection, engine


def test_siblings_share_exactly_their_prefix_and_the_leaves_are_n_and_distinct() -> None:
    """The root hesitates at tokens 2 and 5. At the first look, after four tokens, a branch begins at 2, at the second
    one at 5, and nothing at 5 in the branch, which has had its own token there in the chunk that it was born in."""
    (group,), collection, _ = grown(Hesitates([2, 5], probs=(0.45, 0.4)), n=4)
    root, at_2, at_5, plain = group.rollouts
    assert root.token_ids[:6] == (0, 1, 2, 3, 4, 5) and not root.spans[0].version == GIVEN
    assert at_2.token_ids[:5] == (0, 1, 7, 103, 104) and at_2.given == 3
    assert at_5.token_ids[:8] == (0, 1, 2, 3, 4, 7, 206, 207) and at_5.given == 6
    assert plain.given == 0 and plain.token_ids[0] == 300
    assert len({r.token_ids for r in group.rollouts}) == 4 and {len(r) for r in group.rollouts} == {LONGEST}
    assert collection.metrics()["collect/branches"] == 2.0 and collection.metrics()["collect/pruned"] == 0.0


def test_the_token_that_was_taken_is_not_the_branch_s() -> None:
    """Where the second one was drawn, the first begins the branch."""

    class Second(Hesitates):
        def __call__(self, *words: Any) -> Readout:
            found = super().__call__(*words)
            assert found.top_ids is not None
            return Readout(found.logprobs, top_ids=found.top_ids.flip(2), top_probs=found.top_probs)

    (group,), _, _ = grown(Second([1]), n=2)
    assert group.rollouts[1].token_ids[:2] == (0, 7)


@pytest.mark.parametrize(
    ("probs", "branches"),
    [((0.5, 0.4), 1), ((0.5, 0.25), 0), ((0.4, 0.26), 1), ((0.41, 0.26), 0), ((1.0, 0.0), 0)],
)
def test_thresholds_by_hand(probs: tuple[float, float], branches: int) -> None:
    """p_2 > 0.25 and p_1 - p_2 < 0.15. Where none holds all go on by themselves, drawn as in a plain step."""
    (group,), collection, _ = grown(Hesitates([1], probs=probs), n=2)
    assert collection.metrics()["collect/branches"] == branches
    assert group.rollouts[1].given == 2 * branches


def test_the_earliest_come_first_and_no_more_than_there_is_room_for() -> None:
    (group,), _, _ = grown(Hesitates([0, 1, 2, 3]), n=3)
    assert [r.given for r in group.rollouts] == [0, 1, 2]


def test_no_branch_begins_with_the_end_of_a_text() -> None:
    (group,), collection, _ = grown(Hesitates([1], other=EOS), n=2)
    assert collection.metrics()["collect/branches"] == 0 and group.rollouts[1].given == 0


def test_what_stays_close_is_given_up_and_its_place_is_taken_by_another() -> None:
    """Every sample writes the same, so a branch's first three tokens differ from the root's by one: a distance of 1/3,
    less than 0.4. What differs is kept (above)."""
    (group,), collection, engine = grown(Hesitates([1, 9]), Spelled(same=True), n=2)
    assert collection.metrics()["collect/pruned"] >= 1
    assert [r.request.sample for r in group.rollouts] != [0, 1] and len(group.rollouts) == 2
    kept = grown(Hesitates([1]), Spelled(same=True), n=2, tau_edit=0.3)
    assert kept[1].metrics()["collect/pruned"] == 0


def test_what_has_ended_is_not_judged_and_may_be_left() -> None:
    (group,), collection, _ = grown(Hesitates([1]), Spelled(same=True, ends={0: 3}), n=2)
    assert collection.metrics()["collect/branches"] == 1 and collection.metrics()["collect/pruned"] == 0
    assert group.rollouts[0].finish is Finish.EOS and group.rollouts[1].given == 2


@pytest.mark.parametrize(("step", "trees"), [(0, 8), (9, 8), (10, 6), (20, 4), (79, 4), (80, 2), (200, 0)])
def test_the_share_that_is_a_tree_by_step(step: int, trees: int) -> None:
    read = Hesitates(range(LONGEST))
    groups, _, engine = grown(read, n=8, step=step, prompts=2)
    assert [sum(r.given > 0 for r in group.rollouts) for group in groups] == [max(trees - 1, 0)] * 2
    assert [len(group.rollouts) for group in groups] == [8, 8]
    assert bool(read.asked) == bool(trees) and (trees or len(engine.rounds) == 1)


def test_distances_by_hand() -> None:
    cases = [((), (), 0), ((1,), (), 1), ((1, 2, 3), (1, 3), 1), ((1, 2, 3), (3, 2, 1), 2), ((1, 2), (2, 1, 2), 1)]
    for a, b, distance in cases:
        assert edit_distance(a, b) == edit_distance(b, a) == distance


def test_a_run_grows_trees_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    words = ["collector=lookahead", "collector.chunk=3", "collector.hand_over=12", "collector.prune_after=[3,6]"]
    words += ["train.prompts=4", "sampling.max_new_tokens=32", "collector.tau_abs=0.05", "collector.tau_rel=0.9"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    trained(whole, *words, "train.steps=3")
    trained(folder, *words, "train.steps=2")
    trained(folder, *words, "train.steps=3", f"resume={folder}")
    assert records(folder) == records(whole)
    assert all(row["collect/branches"] > 0 and row["collect/rollouts_max"] == 4 for row in records(whole)[1:])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("correction.prox=drawn",), "correction.prox=drawn takes the sampler for the old policy, but collector=look"),
        (("sparsity=snapkv",), "use sparsity=dense"),
        (("collector.hand_over=128",), "collector.hand_over=128 is never reached with sampling.max_new_tokens=128"),
        (("collector.since=[0,10]",), r"collector.since=\[0, 10\] must be the steps"),
        (("collector.since=[5,10,20,80,200]",), "from 0 on"),
        (("collector.prune_after=[30,20]",), "collector.prune_after"),
        (("collector.tau_abs=1.5",), "collector.tau_abs=1.5"),
        (("collector.chunk=0",), "collector.chunk=0"),
        (("task=guess",), "use task.turns=1"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], said: str) -> None:
    import re

    assert re.search(said, refusal("collector=lookahead", *words))
