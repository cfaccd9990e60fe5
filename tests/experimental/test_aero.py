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
from small import advantages_of, kept_by, scored
from test_collectors import collector, one_step, problems

from grpo_cli.config.instantiate import make
from grpo_cli.select import select
from grpo_cli.types import Request, ScoredGroup


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@functools.cache
def aero(k: float = 1.0) -> Any:
    return make("downsample", made.part("downsample", "aero", k=k))


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


# The baseline


def test_the_baseline_is_the_posterior_mean() -> None:
    """2 of 8 right, Beta(1, 1): 3/10. Of the 3 kept, 1 right: 2/5. Beta(1/2, 3/2) and 8: 2.5/10."""
    rewards, kept = [1.0, 1.0, *[0.0] * 6], [0, 6, 7]
    assert advantages_of(made.advantage("beta"), rewards, kept) == close([0.7, -0.3, -0.3])
    assert advantages_of(made.advantage("beta", stats_over="kept"), rewards, kept) == close([0.6, -0.4, -0.4])
    prior = made.advantage("beta", prior_right=0.5, prior_wrong=1.5)
    assert advantages_of(prior, rewards, kept) == close([0.75, -0.25, -0.25])


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


def test_all_three_together_keep_the_direction_of_the_policy_gradient() -> None:
    """What is made and chosen by right and wrong alone says nothing else of an answer."""

    def group(right: Sequence[bool]) -> Iterator[tuple[int, float]]:
        def solves(request: Request) -> bool:
            return right[request.sample]

        bank = Scripted(solves)
        (made_,) = collection_of(bank, InOrder(problems(1)), n=2, prompts=1).run(MORE)
        assert len(made_.rollouts) == (2 if any(right[:2]) else 3 if right[2] else 4)
        yield from trained(made_, 2, aero())

    found = expected_gradient(4, group)
    factor = float(found @ POLICY_GRADIENT / POLICY_GRADIENT.square().sum())
    torch.testing.assert_close(found, factor * POLICY_GRADIENT, rtol=1e-5, atol=1e-7)
    assert 0.5 < factor
