"""AERO (arXiv 2602.14338): its rounds, its choice and its baseline by hand, and the gradient of all three, exactly."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import made
import numpy as np
import pytest
import torch
from bank import InOrder, Scripted, collection_of
from hypothesis import given
from hypothesis import strategies as st
from small import kept_by, scored
from test_collectors import collector, one_step, problems

from grpo_cli.collect.rehearsal import CollectionSize, rehearsed
from grpo_cli.config.check import check
from grpo_cli.config.compose import settings_of
from grpo_cli.config.instantiate import function
from grpo_cli.config.together import remarks
from grpo_cli.rules.downsample import choose
from grpo_cli.select import select
from grpo_cli.support.errors import UserError
from grpo_cli.types import Request, Reward, ScoredGroup


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@functools.cache
def aero(k: float = 1.0) -> Any:
    return function("downsample", made.part("downsample", "aero", k=k))


def close(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-7)


# Rounds


def test_rollouts_are_made_two_at_a_time_until_the_first_success_or_the_bound() -> None:
    """Of n = 4, at most 9: p0 is solved at once, p1 by its 6th, p2 by its 9th and last, p3 never."""
    solves = {"p0": 0, "p1": 5, "p2": 8, "p3": 99}
    rule = collector("aero", most=9)
    sizes, bank, metrics = one_step(rule, lambda r: r.sample == solves[r.prompt.id], n=4, prompts=4)
    assert sizes == {"p0": 4, "p1": 6, "p2": 9, "p3": 9}
    asked = [Counter(request.prompt.id for request in requests) for requests in bank.rounds]
    assert asked[1:] == [{"p1": 2, "p2": 2, "p3": 2}, {"p2": 2, "p3": 2}, {"p2": 1, "p3": 1}]
    assert len(bank.judged) == 28 and len({request.seed for request in bank.judged}) == 28, "each is judged once"
    assert metrics["collect/later_rounds"] == pytest.approx(12 / 28) and metrics["collect/unsolved"] == 1.0


def test_without_a_bound_it_is_twice_n_and_what_is_solved_at_once_is_one_round() -> None:
    assert one_step(collector("aero"), lambda r: False, n=3, prompts=2)[0] == {"p0": 6, "p1": 6}
    sizes, bank, metrics = one_step(collector("aero"), lambda r: True, n=3, prompts=2)
    assert sizes == {"p0": 3, "p1": 3} and len(bank.rounds) == 1 and metrics["collect/later_rounds"] == 0.0
    assert rehearsed(collector("aero", more=3), n=4, prompts=5) == CollectionSize(5, 5, 20, 40, 3, 40, unequal=True)


def test_a_run_that_has_generated_all_its_tokens_asks_for_no_further_round() -> None:
    bank = Scripted()
    collection = collection_of(bank, InOrder(problems(9)), n=4, prompts=2)
    collection._tokens_left = 8 + 3  # tokens of one a rollout: the first round takes 8, the second 4
    assert [len(group.rollouts) for group in collection.run(collector("aero"), bank)] == [6, 6]


# The choice


def kept(right: int, wrong: int, m: int, k: float = 1.0, seed: int = 0) -> tuple[int, int]:
    """How many right and how many wrong ones are kept."""
    group = kept_by(aero(k), scored(*[1.0] * right, *[0.0] * wrong), m, rng(seed))
    return group.solved, len(group.rollouts) - group.solved


@pytest.mark.parametrize(
    ("right", "wrong", "k", "expected"),
    [
        (1, 31, 1.0, (1, 1)),
        (3, 29, 1.0, (3, 3)),
        (1, 31, 3.0, (1, 3)),
        (2, 30, 1.5, (2, 3)),
        (4, 28, 1.0, (4, 4)),
        (0, 32, 1.0, (0, 1)),  # as of one right answer
        (0, 32, 1e38, (0, 8)),
        (9, 3, 1e38, (5, 3)),
        (12, 20, 1.0, (4, 4)),  # 24 are more than 8: half and half
        (3, 29, 3.0, (3, 5)),
        (12, 20, 3.0, (4, 4)),
        (1, 31, 20.0, (1, 7)),
        (30, 2, 1.0, (6, 2)),
        (32, 0, 1.0, (8, 0)),
        (12, 20, 0.1, (7, 1)),
        (1, 31, 0.1, (1, 1)),
    ],
)
def test_all_right_answers_and_some_wrong_ones_are_kept_of_32_at_most_8(right, wrong, k, expected) -> None:
    assert kept(right, wrong, 8, k) == expected


@given(right=st.integers(0, 12), wrong=st.integers(0, 12), m=st.integers(1, 12), k=st.sampled_from([0.3, 1.0, 2.5]))
def test_no_right_answer_is_left_out_while_there_is_room(right, wrong, m, k) -> None:
    if right + wrong <= m:
        return
    good, bad = kept(right, wrong, m, k)
    assert 1 <= good + bad <= m
    assert bad <= max(1, round(k * max(right, 1)))
    assert good == right or (good + bad == m and bad <= m // 2), "wrong ones have left all but half of the places"


def test_each_wrong_answer_is_as_likely_to_be_kept() -> None:
    group = scored(0.0, 1.0, 0.0, 0.0)
    drawn = Counter(index for seed in range(300) for index in choose(aero(), group, 3, rng(seed)))
    assert drawn[1] == 300 and min(drawn[index] for index in (0, 2, 3)) > 70


def test_only_a_rule_that_says_so_keeps_fewer_and_none_keeps_nothing() -> None:
    group = scored(0.0, 1.0, 0.0, 0.0)
    with pytest.raises(UserError, match="returned 1 of them: return exactly 2"):
        choose(lambda group, keep, rng: [0], group, 2, rng())

    def nothing(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
        return []

    nothing.keeps_fewer = True  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="returned 0 of them: return 1 to 2"):
        choose(nothing, group, 2, rng())


# The baseline


def test_the_baseline_is_the_posterior_mean() -> None:
    """2 of 8 right, Beta(1, 1): 3/10. Of the 3 kept, 1 right: 2/5. Beta(1/2, 3/2) and 8: 2.5/10."""
    rewards, group = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 1.0] + [0.0] * 6)
    assert made.advantage("beta")(rewards, group).tolist() == close([0.7, -0.3, -0.3])
    assert made.advantage("beta", stats_over="kept")(rewards, group).tolist() == close([0.6, -0.4, -0.4])
    prior = made.advantage("beta", prior_right=0.5, prior_wrong=1.5)
    assert prior(rewards, group).tolist() == close([0.75, -0.25, -0.25])


@pytest.mark.parametrize(
    "weights", ["+task.weights.overlong=0.5", "+task.weights.correct=0.9 +task.weights.format=0.2"]
)
def test_weights_that_lead_out_of_0_and_1_are_refused_beforehand(weights: str) -> None:
    with pytest.raises(UserError, match="advantage=beta takes rewards from 0 to 1, and those of task.weights="):
        check(settings_of("advantage=beta", *weights.split()))
    check(settings_of("advantage=beta", "+task.weights.correct=0.9", "+task.weights.format=0.1"))


def test_equal_rewards_teach_the_less_the_more_there_are() -> None:
    """All of 3 right: 1 - 4/5. All of 8 wrong: -1/10. Half of a right answer each: (1 + 1) / 4, so 0."""
    beta = made.advantage("beta")
    for rewards, expected in (([1.0] * 3, 0.2), ([0.0] * 8, -0.1), ([0.5] * 2, 0.0), ([], 0.0)):
        given_ = torch.tensor(rewards)
        assert beta(given_, given_).tolist() == close([expected] * len(rewards))


@pytest.mark.parametrize(("stats_over", "group"), [("kept", [1.0, -0.5]), ("group", [1.0, 0.0, 1.5])])
def test_rewards_outside_0_and_1_are_refused_with_a_way_out(stats_over: str, group: list[float]) -> None:
    with pytest.raises(UserError, match=r"from 0 to 1, and one is (-0.5|1.5): .*task.weights.*advantage=dr_grpo"):
        made.advantage("beta", stats_over=stats_over)(torch.tensor(group[:2]), torch.tensor(group))


# Grades that are neither right nor wrong


def test_right_is_what_is_graded_right_whatever_the_total() -> None:
    """Totals of 1 less a punishment of length, and of a form alone."""
    rewards = [Reward(0.4, {"correct": 1.0, "overlong": -0.6}), *[Reward(0.3, {"correct": 0.0, "form": 0.3})] * 3]
    group = kept_by(aero(), scored(*rewards), 3, rng())
    assert sorted(reward.total for reward in group.rewards) == [0.3, 0.4]


def test_a_grade_between_is_refused_by_its_sample_with_a_way_out() -> None:
    with pytest.raises(UserError, match=r"downsample=aero .* sample 1 of prompt p is graded 0.5: .*downsample=maxvar"):
        choose(aero(), scored(1.0, 0.5, 0.0), 2, rng())
    part = Reward(1.0, {"score": 0.25}, answer_part="score")
    with pytest.raises(UserError, match=r"graded 0.25: let the reward grade with 0 or 1"):
        choose(aero(), scored(part, 0.0, 0.0), 2, rng())

    class Halves(Scripted):
        def reward(self, prompt: Any, rollout: Any) -> Reward:
            return Reward(0.5)

    bank = Halves()
    with pytest.raises(UserError, match=r"collector=aero .* sample 0 of prompt p0 is graded 0.5: .*collector=equal"):
        collection_of(bank, InOrder(problems(4)), n=2, prompts=1).run(collector("aero"), bank)


def test_a_bound_that_takes_more_rounds_than_anybody_waits_for_is_refused() -> None:
    with pytest.raises(UserError, match="collector.most=406 comes to 201 further rounds of collector.more=2"):
        one_step(collector("aero", most=406), lambda r: False, n=4, prompts=1)
    assert one_step(collector("aero", most=404), lambda r: False, n=4, prompts=1)[0] == {"p0": 404}


def test_a_bound_below_n_is_refused() -> None:
    with pytest.raises(UserError, match="collector.most=3 is less than n=4"):
        one_step(collector("aero", most=3), lambda r: False, n=4, prompts=1)


def test_its_whole_is_taken_without_a_word_and_its_collector_alone_with_one() -> None:
    words = ["collector=aero", "advantage=beta", "n=8", "m=4"]
    for choice, warned in (("aero", 0), ("maxvar", 1)):
        settings = settings_of(*words, f"downsample={choice}")
        tried = check(settings)
        assert len([*remarks(settings, tried.rules, tried.size)]) == warned


# The gradient, of a policy that is a table of four answers to one problem, two of them right

LOGITS = torch.tensor([0.3, -1.2, 0.9, -0.1], dtype=torch.float64)
RIGHT = (0, 1)
CHANCES = LOGITS.softmax(0)
SCORES = torch.eye(4, dtype=torch.float64) - CHANCES  # row a: the gradient of log pi(a)
POLICY_GRADIENT = sum(CHANCES[a] * SCORES[a] for a in RIGHT)
BETA, MORE = made.advantage("beta", prior_right=2.0), collector("aero", more=1, most=4)


def expected_gradient(most: int, group: Any) -> torch.Tensor:
    """The mean over all sequences of `most` answers of what `group`, told which are right, makes of them: the sum of
    advantage times score."""
    total = torch.zeros(4, dtype=torch.float64)
    for answers in itertools.product(range(4), repeat=most):
        chance = CHANCES[list(answers)].prod()
        for sample, advantage in group([answer in RIGHT for answer in answers]):
            total += chance * advantage * SCORES[answers[sample]]
    return total


def trained(group: ScoredGroup, m: int, rule: Any) -> Iterator[tuple[int, float]]:
    size = len(group.rollouts)
    selection = select(group, [""] * size, m, rule, BETA, rng(), True)
    yield from zip(selection.indices, selection.advantages.double().tolist(), strict=True)


def test_with_all_of_a_fixed_group_the_gradient_is_the_policy_gradient_but_for_a_known_factor() -> None:
    """Beta(2, 1) and N = 4: 1 - 1/7 of each of four rollouts' gradients."""
    found = expected_gradient(4, lambda right: trained(scored(*map(float, right)), 4, made.downsample("all")))
    torch.testing.assert_close(found, 4 * (6 / 7) * POLICY_GRADIENT, rtol=1e-5, atol=1e-7)


def test_all_three_together_keep_the_direction_of_the_policy_gradient() -> None:
    """What is made and chosen by right and wrong alone says nothing else of an answer."""

    def group(right: Sequence[bool]) -> Iterator[tuple[int, float]]:
        def solves(request: Request) -> bool:
            return right[request.sample]

        bank = Scripted(solves)
        (made_,) = collection_of(bank, InOrder(problems(1)), n=2, prompts=1).run(MORE, bank)
        assert len(made_.rollouts) == (2 if any(right[:2]) else 3 if right[2] else 4)
        yield from trained(made_, 2, aero())

    found = expected_gradient(4, group)
    factor = float(found @ POLICY_GRADIENT / POLICY_GRADIENT.square().sum())
    torch.testing.assert_close(found, factor * POLICY_GRADIENT, rtol=1e-5, atol=1e-7)
    assert 0.5 < factor


def test_a_choice_by_the_answer_itself_does_not() -> None:
    """So that the tests above can fail: half of the answers 2, which are wrong, are left out."""
    found = expected_gradient(1, lambda right: trained(scored(*map(float, right)), 1, made.downsample("all")))
    found -= 0.5 * CHANCES[2] * float(BETA(torch.zeros(1), torch.zeros(1))[0]) * SCORES[2]
    factor = float(found @ POLICY_GRADIENT / POLICY_GRADIENT.square().sum())
    assert not torch.allclose(found, factor * POLICY_GRADIENT, rtol=1e-2)
