"""What goes by how long rollouts are: tail batching (arXiv 2509.21009), SortedRL (2603.23414) and the shortest of a
group (2605.30859)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
from bank import InOrder, Scripted, collection_of
from small import scored
from test_collectors import problems
from test_partial import PROBLEMS, Slotted, held_of, step_of
from test_resume import cut_off_and_resumed, rows

from grpo_cli.collect.epochs import Epochs
from grpo_cli.collect.equal import equal
from grpo_cli.collect.rehearsal import CollectionSize, rehearsed
from grpo_cli.collect.requests import seed_of
from grpo_cli.config.check import check
from grpo_cli.config.compose import settings_of
from grpo_cli.experimental.roll_packer import Tail
from grpo_cli.experimental.sorted_rl import Sorted
from grpo_cli.methods.april import Partial
from grpo_cli.rules.downsample import choose
from grpo_cli.support.errors import UserError
from grpo_cli.types import ENVIRONMENT, Finish, Request, Reward, Rollout, ScoredGroup, Span


def aside_of(rule: Tail) -> list[str]:
    return [group["prompt"][0] for group in rule.state_dict()["aside"]]


class ByLength(Scripted):
    """Each rollout has so many tokens as a table says of its problem; it is right if they are more than one."""

    def __init__(self, length: Callable[[Request], int]) -> None:
        super().__init__()
        self.length = length

    def generate(
        self, requests: Sequence[Request], enough: Callable[[Rollout], bool] | None = None
    ) -> Iterator[Rollout]:
        self.rounds.append(list(requests))
        stopped_at = None
        for request in sorted(requests, key=self.length):
            length = self.length(request)
            if stopped_at is None or length == stopped_at:
                rollout = Rollout(request, (3,) * length, (-1.0,) * length, Finish.EOS, 0)
                yield rollout
                if stopped_at is None and enough is not None and enough(rollout):
                    stopped_at = length
            else:
                yield Rollout(request, (3,) * stopped_at, (-1.0,) * stopped_at, Finish.PARTIAL, 0)

    def reward(self, prompt: Any, rollout: Rollout) -> Reward:
        return Reward(float(len(rollout) > 1))


# Tail batching


def test_long_problems_are_set_aside_and_come_together_worked_by_hand() -> None:
    """Two problems a step and one more under way; the lengths of one rollout each. In step 0 p0 and p2 end after 4
    tokens, of which p1 has as many; so step 1 with p3, p4 and p5; then two are aside, and step 2 is theirs."""
    lengths = {"p0": 2, "p1": 9, "p2": 4, "p3": 3, "p4": 3, "p5": 8, "p6": 1, "p7": 2, "p8": 5}
    engine, rule, curriculum = ByLength(lambda r: lengths[r.prompt.id]), Tail(surplus=0.5), OnceInOrder(9)
    told = []
    for step in range(4):
        collection = collection_of(engine, curriculum, n=1, prompts=2, step=step, version=step)
        groups = collection.run(rule, engine)
        told.append(([g.prompt.id for g in groups], aside_of(rule), collection.metrics()["collect/tokens_dropped"]))
        assert all(rollout.spans == (Span(step, len(rollout)),) for group in groups for rollout in group.rollouts)
        assert collection.metrics()["collect/long_step"] == (step == 2)
        assert collection.metrics()["collect/set_aside"] == len(told[-1][1])
    assert told == [
        (["p0", "p2"], ["p1"], 4.0),
        (["p3", "p4"], ["p1", "p5"], 3.0),
        (["p1", "p5"], [], 0.0),
        (["p6", "p7"], ["p8"], 2.0),
    ]


class OnceInOrder(InOrder):
    """No problem comes twice."""

    def __init__(self, count: int) -> None:
        super().__init__(problems(count))
        self.seen: set[str] = set()

    def pick(self, step: int, count: int, without: Any) -> Any:
        found = super().pick(step, count, self.seen | set(without))
        self.seen |= {prompt.id for prompt in found}
        return found


@pytest.mark.parametrize(("surplus", "slots"), [(0.25, 100), (1.0, 100), (0.5, 6)])
def test_in_fifty_steps_every_rollout_is_of_the_steps_own_weights_and_as_the_first_draw_has_it(surplus, slots) -> None:
    """`equal` is asked for the same problems in the step in which they were begun."""
    engine, rule, curriculum = Slotted(slots), Tail(surplus=surplus), Epochs(PROBLEMS, 4, 0)
    seen, waiting, begun_at, long_steps = set[int](), list[str](), dict[int, int](), 0
    for step in range(50):
        collection = step_of(engine, step, curriculum=curriculum)
        groups = collection.run(rule, engine)
        begun_at = {request.seed: step for request in engine.calls[-1]} | begun_at
        long_steps += int(collection.metrics()["collect/long_step"])
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            assert rollout.finish is not Finish.PARTIAL and rollout.spans == (Span(step, len(rollout)),)
            request = rollout.request
            assert request.seed == seed_of(7, begun_at[request.seed], request.prompt.id, request.sample)
            assert request.seed not in seen, "nothing comes twice"
            seen.add(request.seed)
            (alone,) = Slotted().generate([request])
            assert (rollout.token_ids, rollout.finish) == (alone.token_ids, alone.finish)
        assert len(groups) >= 4 and not set(aside_of(rule)) & {group.prompt.id for group in groups}
        waiting = aside_of(rule)
    assert 0 < long_steps <= 25
    assert len(begun_at.keys() - seen) == 3 * len(waiting), "what is set aside waits, and nothing else is lost"
    assert len(engine.judged) == len(seen), "what is made anew is not judged before"


def test_the_gradient_of_all_that_is_trained_on_is_the_policy_gradient() -> None:
    """A table of two answers: long and right with chance p, or short and wrong. Two problems begin; where one is short
    and one long, the long one is made in the next step. Over all draws, rewards times scores of both come to twice the
    policy gradient; would the long one be drawn anew, they would come to less."""
    chance = 0.3
    score = {2: 1 - chance, 1: -chance}  # of the logit, by length
    total = 0.0
    for drawn in itertools.product((1, 2), repeat=2):
        of = {seed_of(0, 0, f"p{place}", 0): length for place, length in enumerate(drawn)}
        rule, curriculum, trained = Tail(surplus=1.0), OnceInOrder(9), dict[str, float]()
        for step in range(2 if len(set(drawn)) == 2 else 1):
            engine = ByLength(lambda request, of=of: of.get(request.seed, 1))
            for group in collection_of(engine, curriculum, n=1, prompts=1, step=step).run(rule, engine):
                trained[group.prompt.id] = group.rewards[0].total * score[len(group.rollouts[0])]
        assert trained.keys() == {"p0", "p1"}
        weight = np.prod([chance if length == 2 else 1 - chance for length in drawn])
        total += weight * sum(trained.values())
    assert total == pytest.approx(2 * chance * (1 - chance), abs=1e-12)


def test_without_a_surplus_tail_is_the_plain_collector() -> None:
    plain, other = Slotted(), Slotted()
    assert step_of(other, 0).run(Tail(surplus=0.0), other) == step_of(plain, 0).run(equal, plain)
    assert plain.calls == other.calls and rehearsed(Tail(surplus=0.0), 4, 6) == CollectionSize.equal(4, 6)


def test_a_rehearsal_knows_that_tail_begins_anew_and_sorted_goes_on() -> None:
    tail, sorted_ = rehearsed(Tail(surplus=0.5), n=4, prompts=6), rehearsed(Sorted(loads=2), n=4, prompts=6)
    assert (tail.problems, tail.rollouts, tail.partial, tail.resumed) == (9, 36, True, False)
    assert (sorted_.problems, sorted_.rollouts, sorted_.partial, sorted_.resumed) == (12, 48, True, True)
    assert rehearsed(Partial(surplus=1.0, max_lag=4), n=1, prompts=4).resumed, "also of groups of one"


def test_tail_goes_with_eviction_and_not_with_one_problem_a_step_nor_workers() -> None:
    check(settings_of("collector=tail", "sparsity=snapkv"))
    with pytest.raises(
        UserError, match=r"train.prompts=1 makes every second step of collector=tail .* collector=equal"
    ):
        check(settings_of("collector=tail", "train.prompts=1"))
    with pytest.raises(UserError, match="collector=tail stops rollouts before their end, which engine=ray cannot"):
        check(settings_of("collector=tail", "engine=ray"))
    with pytest.raises(UserError, match="collector=sorted goes on with partial rollouts"):
        check(settings_of("collector=sorted", "sparsity=snapkv"))


@pytest.mark.parametrize(
    ("choice", "noted"), [("tail", "collect/set_aside"), ("sorted", "collect/carried_rollouts")], ids=str
)
def test_what_a_checkpoint_holds_goes_on_to_the_bit(tmp_path: Path, choice: str, noted: str) -> None:
    words = [f"collector={choice}", "train.prompts=3", "train.steps=5", "record.rollouts=-1", "optim.lr=1e-3"]
    words += ["collector.surplus=1.0"] * (choice == "tail") + ["sampling.max_new_tokens=40"]
    cut_off_and_resumed(tmp_path, *words, step=5)
    told = rows(tmp_path / "alone")
    assert told[1][noted] and len(told) == 6
    assert choice == "sorted" or 0 < sum(float(row.get("collect/long_step", 0)) for row in told) < 5  # type: ignore[arg-type]


def test_the_state_of_one_is_not_taken_for_anothers() -> None:
    for rule in (Partial(surplus=1.0, max_lag=4), Tail(surplus=1.0)):
        with pytest.raises(UserError, match="has learnt, but this run has collector=sorted"):
            Sorted(loads=2).load_state_dict(rule.state_dict())


# Length-sorted updates


def test_a_load_is_trained_on_from_its_shortest_to_its_longest_before_the_next_begins() -> None:
    """Three steps of two problems: p0 and p3, p4 and p1, p2 and p5. Then the next load."""
    lengths = {"p0": 1, "p1": 7, "p2": 9, "p3": 2, "p4": 5, "p5": 12} | {f"p{place}": place for place in range(6, 12)}
    engine, rule, curriculum = Continued(lengths), Sorted(loads=3), OnceInOrder(12)
    trained = []
    for step in range(4):
        groups = collection_of(engine, curriculum, n=1, prompts=2, step=step, version=step).run(rule, engine)
        trained.append({group.prompt.id for group in groups})
        assert len(curriculum.seen) == (6 if step < 3 else 12)
        assert max(step % 3 - span.version % 3 for g in groups for r in g.rollouts for span in r.spans) == step % 3
    assert trained == [{"p0", "p3"}, {"p4", "p1"}, {"p2", "p5"}, {"p6", "p7"}]
    assert [len(group.rollouts[0]) for group in held_of(rule)] == [7] * 4, (
        "each has come as far as the longest that ended"
    )


class Continued(ByLength):
    """Lengths are of the whole rollout, also where it goes on."""

    def __init__(self, lengths: dict[str, int]) -> None:
        super().__init__(lambda request: lengths[request.prompt.id.partition("+")[0]] - request.resumed)


# The shortest of a group


def replies(*lengths: int, logprobs: Sequence[float] = ()) -> ScoredGroup:
    said = logprobs or [-1.0] * len(lengths)
    return scored(
        *[0.0] * len(lengths),
        replies=[(1,) * length for length in lengths],
        logprobs=[(logprob,) * length for length, logprob in zip(lengths, said, strict=True)],
    )


SHORTEST = made.downsample("shortest")


def chosen(group: ScoredGroup, keep: int, seed: int = 0) -> list[int]:
    return choose(SHORTEST, group, keep, np.random.default_rng(seed))


def test_the_shortest_are_kept_and_of_equally_long_ones_the_likeliest() -> None:
    assert chosen(replies(5, 2, 9, 3, 4), 3) == [1, 3, 4]
    assert chosen(replies(3, 3, 1, 3, logprobs=[-2.0, -0.5, -9.0, -1.0]), 3) == [1, 2, 3]
    assert {tuple(chosen(replies(3, 3, 3), 2, seed)) for seed in range(40)} == {(0, 1), (0, 2), (1, 2)}


def test_what_an_environment_said_is_no_length_and_what_was_given_no_doubt() -> None:
    """The first reply has 2 tokens and 5 of the environment's; the two others 3, of which the last was given two."""
    nan = float("nan")
    group = replies(7, 3, 3)
    first = replace(group.rollouts[0], spans=(Span(0, 2), Span(ENVIRONMENT, 5)))
    second = replace(group.rollouts[1], sampler_logprobs=(-1.0, -1.0, -1.0))
    third = replace(group.rollouts[2], sampler_logprobs=(nan, nan, -0.5))
    group = replace(group, rollouts=(first, second, third))
    assert all(chosen(group, 1, seed) == [0] and chosen(group, 2, seed) == [0, 2] for seed in range(9))


# The study


def test_the_study_is_a_sweep_of_five_rules_at_equal_tokens() -> None:
    settings = settings_of("experiment=downsampling_study", "downsample=shortest")
    assert settings.train.max_generated == 1.1e6 and (settings.n, settings.m) == (64, 16)
    check(settings)
